/* Opens many connections in a row, and checks that their requests arrive in the order of the calls.
 *
 * in_order ADDR PORT ROUNDS
 *
 * The program starts all connections before it waits for a reply, with a sequence number in the
 * private data of each request. A listener in the same process accepts the requests, which must
 * arrive in this order. Some programs identify their connections by this order. Exit status: 0 if
 * all requests arrived in order.
 */
#include "pair.h"

#define CONNECTIONS 32

static const struct ibv_qp_init_attr small = { .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };

/* Returns an identifier with a resolved route and a queue pair. */
static struct rdma_cm_id *create_resolved_id(struct rdma_event_channel *channel,
	struct sockaddr_in *address)
{
	struct ibv_qp_init_attr attr = small;
	struct rdma_cm_id *id;

	fail_if(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) ||
		rdma_resolve_addr(id, NULL, (struct sockaddr *)address, 2000), "the address");
	event(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	fail_if(rdma_resolve_route(id, 2000), "the route");
	event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
	fail_if(rdma_create_qp(id, NULL, &attr), "a queue pair");
	return id;
}

/* Returns the next connection request, and the sequence number in its private data. */
static int next_request(struct rdma_event_channel *channel, struct rdma_cm_id **id)
{
	struct rdma_cm_event *event;
	int number;

	do {
		fail_if(rdma_get_cm_event(channel, &event), "a request");
		*id = event->id;
		number = -1;
		if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST)
			number = *(const unsigned char *)event->param.conn.private_data;
		fail_if(event->event != RDMA_CM_EVENT_CONNECT_REQUEST &&
			event->event != RDMA_CM_EVENT_ESTABLISHED, rdma_event_str(event->event));
		rdma_ack_cm_event(event);
	} while (number < 0);
	return number;
}

static void destroy_ids(struct rdma_event_channel *channel, struct rdma_cm_id *ids[])
{
	for (int i = 0; i < CONNECTIONS; i++)
		rdma_destroy_qp(ids[i]);
	drain_events(channel);
	for (int i = 0; i < CONNECTIONS; i++)
		fail_if(rdma_destroy_id(ids[i]), "destroying an identifier");
}

/* Returns the number of requests that arrived out of order. */
static int run_round(struct sockaddr_in *address)
{
	struct rdma_event_channel *ours = rdma_create_event_channel(),
		*theirs = rdma_create_event_channel();
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct rdma_cm_id *ids[CONNECTIONS], *accepted[CONNECTIONS], *listener;
	unsigned char number;
	int wrong = 0;

	fail_if(!ours || !theirs, "a channel");
	listener = listen_at(theirs, address, CONNECTIONS);
	for (int i = 0; i < CONNECTIONS; i++)
		ids[i] = create_resolved_id(ours, address);
	param.private_data = &number;
	param.private_data_len = sizeof number;
	for (number = 0; number < CONNECTIONS; number++)
		fail_if(rdma_connect(ids[number], &param), "connecting");
	param.private_data_len = 0;
	for (int i = 0; i < CONNECTIONS; i++) {
		struct ibv_qp_init_attr attr = small;
		int received = next_request(theirs, &accepted[i]);

		if (received != i) {
			printf("request %d arrived at position %d\n", received, i);
			wrong++;
		}
		fail_if(rdma_create_qp(accepted[i], NULL, &attr) || rdma_accept(accepted[i],
			&param),
			"accepting");
	}
	for (int i = 0; i < CONNECTIONS; i++)
		event(ours, RDMA_CM_EVENT_ESTABLISHED);
	destroy_ids(ours, ids);
	destroy_ids(theirs, accepted);
	fail_if(rdma_destroy_id(listener), "destroying the listener");
	rdma_destroy_event_channel(ours);
	rdma_destroy_event_channel(theirs);
	return wrong;
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	int wrong = 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc != 4)
		return 2;
	address.sin_port = htons((unsigned short)atoi(argv[2]));
	fail_if(inet_pton(AF_INET, argv[1], &address.sin_addr) != 1, "the address");
	for (int round = 0; round < atoi(argv[3]) && !wrong; round++)
		wrong = run_round(&address);
	return wrong != 0;
}
