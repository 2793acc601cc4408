/* Changes memory as soon as the Writes from it have completed, while the peer has not read them.
 *
 * rewriting ADDR PORT MESSAGES
 *
 * Accepts a connection of a peer that reads late, and posts MESSAGES Writes of 64 KiB, one after
 * the other, from the same memory. All bytes of Write N have the value N, modulo 251. Exit status:
 * 0 if all Writes complete.
 */
#include "pair.h"

#define OCTETS (64 * 1024)

static unsigned char octets[OCTETS];

static void complete(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	int count;

	while (!(count = ibv_poll_cq(cq, 1, &wc)))
		usleep(1000);
	fail_if(count < 0, "polling");
	if (wc.status != IBV_WC_SUCCESS) {
		printf("failed: a Write: %s\n", ibv_wc_status_str(wc.status));
		exit(1);
	}
}

int main(int argc, char **argv)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 },
					 .sq_sig_all = 1 };
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct ibv_send_wr wr = { .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE }, *bad;
	struct sockaddr_in address = { .sin_family = AF_INET };
	struct rdma_event_channel *channel;
	struct rdma_cm_id *listener, *id;
	struct ibv_sge sge;
	struct ibv_mr *mr;

	if (argc != 4 || inet_pton(AF_INET, argv[1], &address.sin_addr) != 1) {
		fprintf(stderr, "usage: rewriting ADDR PORT MESSAGES\n");
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
	for (int i = 0; i < atoi(argv[3]); i++) {
		memset(octets, i % 251, OCTETS);
		fail_if(ibv_post_send(id->qp, &wr, &bad), "a Write");
		complete(id->send_cq);
	}
	event(channel, RDMA_CM_EVENT_DISCONNECTED);
	fail_if(ibv_dereg_mr(mr), "deregistration");
	rdma_destroy_qp(id);
	fail_if(rdma_destroy_id(id) || rdma_destroy_id(listener), "destroying an identifier");
	rdma_destroy_event_channel(channel);
	return 0;
}
