/* A connection that ends with much unread data.
 *
 * unread ADDR PORT
 *
 * Two queue pairs of this process are connected with each other. The first sends megabytes. The
 * second has no receive for them, so it ends the connection after a while. It must then read and
 * discard all data that TCP has queued: if it does not, the peer's FIN never arrives, and neither
 * end is notified. Exit status: 0 if both were notified.
 */
#include "pair.h"

#define SENDS 64
#define OCTETS (64 * 1024)
#define PATIENCE_MS 20000

static unsigned char octets[OCTETS];

static void ends(struct rdma_event_channel *channel, const char *who)
{
	struct pollfd ready = { channel->fd, POLLIN, 0 };

	errno = ETIMEDOUT;
	must(poll(&ready, 1, PATIENCE_MS) != 1, who);
	event(channel, RDMA_CM_EVENT_DISCONNECTED);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { SENDS, 1, 1, 1, 0 } };
	struct ibv_send_wr wr = { .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
	struct ibv_sge sge;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct pair pair;

	if (argc != 3 || inet_pton(AF_INET, argv[1], &address.sin_addr) != 1) {
		fprintf(stderr, "usage: unread ADDR PORT\n");
		return 2;
	}
	address.sin_port = htons(atoi(argv[2]));
	pair = begin_pair(&address);
	cq = ibv_create_cq(pair.writer->verbs, 2 * SENDS + 2, NULL, NULL, 0);
	must(!cq, "a completion queue");
	attr.send_cq = attr.recv_cq = cq;
	join_pair(&pair, attr, attr);
	mr = ibv_reg_mr(pair.writer->qp->pd, octets, OCTETS, 0);
	must(!mr, "a region");
	sge = (struct ibv_sge){ (uintptr_t)octets, OCTETS, mr->lkey };
	wr.sg_list = &sge;
	for (int i = 0; i < SENDS; i++)
		must(ibv_post_send(pair.writer->qp, &wr, &bad), "a Send");
	ends(pair.theirs, "the end, at the receiver");
	ends(pair.ours, "the end, at the sender");
	end_queue_pairs(&pair);
	must(ibv_dereg_mr(mr) || ibv_destroy_cq(cq), "the end of the region and the queue");
	end_pair(&pair);
	printf("both ends were told\n");
	return 0;
}
