/* Ends a connection while megabytes of received data are unread.
 *
 * unread ADDR PORT
 *
 * Two queue pairs of this process are connected to each other. The first sends megabytes. The
 * second has posted no receives, so it ends the connection after a while. It must then read and
 * discard all data that TCP has queued: if it does not, the peer's FIN never arrives, and neither
 * end is notified. Exit status: 0 if both ends were notified.
 */
#include "pair.h"

#define SENDS 64
#define OCTETS (64 * 1024)
#define TIMEOUT_MS 20000

static unsigned char octets[OCTETS];

static void expect_disconnect(struct rdma_event_channel *channel, const char *who)
{
	struct pollfd ready = { channel->fd, POLLIN, 0 };

	errno = ETIMEDOUT;
	fail_if(poll(&ready, 1, TIMEOUT_MS) != 1, who);
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
	fail_if(!cq, "a completion queue");
	attr.send_cq = attr.recv_cq = cq;
	join_pair(&pair, attr, attr);
	mr = ibv_reg_mr(pair.writer->qp->pd, octets, OCTETS, 0);
	fail_if(!mr, "a memory region");
	sge = (struct ibv_sge){ (uintptr_t)octets, OCTETS, mr->lkey };
	wr.sg_list = &sge;
	for (int i = 0; i < SENDS; i++)
		fail_if(ibv_post_send(pair.writer->qp, &wr, &bad), "a Send");
	expect_disconnect(pair.theirs, "no disconnect event at the receiver");
	expect_disconnect(pair.ours, "no disconnect event at the sender");
	destroy_queue_pairs(&pair);
	fail_if(ibv_dereg_mr(mr) || ibv_destroy_cq(cq),
		"destroying the region and the completion queue");
	destroy_pair(&pair);
	printf("both ends were notified\n");
	return 0;
}
