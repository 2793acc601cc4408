/* Deregisters memory whose data the peer does not read.
 *
 * withdrawing ADDR PORT
 *
 * Accepts a connection of a peer that reads nothing, posts Writes until TCP takes no more, and then
 * deregisters their source. Exit status: 0 if that succeeds, and the queue pair can be destroyed.
 */
#include "pair.h"

#define WRITES 16
#define OCTETS (1024 * 1024)

static unsigned char octets[OCTETS];

int main(int argc, char **argv)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { WRITES, 1, 1, 1, 0 } };
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct ibv_send_wr wr = { .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE }, *bad;
	struct sockaddr_in address = { .sin_family = AF_INET };
	struct rdma_event_channel *channel;
	struct rdma_cm_id *listener, *id;
	struct ibv_sge sge;
	struct ibv_mr *mr;
	int error;

	if (argc != 3 || inet_pton(AF_INET, argv[1], &address.sin_addr) != 1) {
		fprintf(stderr, "usage: withdrawing ADDR PORT\n");
		return 2;
	}
	address.sin_port = htons(atoi(argv[2]));
	channel = rdma_create_event_channel();
	listener = listen_at(channel, &address, 1);
	id = event(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	fail_if(rdma_create_qp(id, NULL, &attr), "a queue pair");
	fail_if(rdma_accept(id, &param), "accept");
	event(channel, RDMA_CM_EVENT_ESTABLISHED);
	mr = ibv_reg_mr(id->qp->pd, octets, OCTETS, IBV_ACCESS_LOCAL_WRITE);
	fail_if(!mr, "a memory region");
	sge = (struct ibv_sge){ (uintptr_t)octets, OCTETS, mr->lkey };
	wr.sg_list = &sge;
	for (int i = 0; i < WRITES; i++)
		fail_if(ibv_post_send(id->qp, &wr, &bad), "a Write");
	sleep(1);
	error = ibv_dereg_mr(mr);
	printf("deregistration: %s\n", strerror(error));
	rdma_destroy_qp(id);
	fail_if(rdma_destroy_id(id) || rdma_destroy_id(listener), "destroying an identifier");
	rdma_destroy_event_channel(channel);
	return error;
}
