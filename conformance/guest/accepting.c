/* Accepts connections, whose peers need not send anything, and keeps them.
 *
 * accepting ADDR PORT COUNT
 *
 * Accepts COUNT connections, prints a line, and waits for a signal. Other events are ignored: a
 * connection may end meanwhile.
 */
#include "pair.h"

static void accept_request(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	static struct ibv_pd *pd;
	static struct ibv_cq *cq;

	if (!pd)
		pd = ibv_alloc_pd(id->verbs);
	if (!cq)
		cq = ibv_create_cq(id->verbs, 16, NULL, NULL, 0);
	fail_if(!pd || !cq, "a protection domain or completion queue");
	attr.send_cq = attr.recv_cq = cq;
	fail_if(rdma_create_qp(id, pd, &attr), "a queue pair");
	fail_if(rdma_accept(id, &param), "accept");
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	struct rdma_event_channel *channel;
	int accepted = 0;

	if (argc != 4 || inet_pton(AF_INET, argv[1], &address.sin_addr) != 1) {
		fprintf(stderr, "usage: accepting ADDR PORT COUNT\n");
		return 2;
	}
	address.sin_port = htons(atoi(argv[2]));
	channel = rdma_create_event_channel();
	listen_at(channel, &address, 64);
	for (;;) {
		struct rdma_cm_event *event;

		fail_if(rdma_get_cm_event(channel, &event), "an event");
		if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST)
			accept_request(event->id);
		if (event->event == RDMA_CM_EVENT_ESTABLISHED && ++accepted == atoi(argv[3]))
			printf("accepted %d\n", accepted);
		rdma_ack_cm_event(event);
		fflush(stdout);
	}
}
