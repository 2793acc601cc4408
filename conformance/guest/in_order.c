/* Opens many connections in a row, and checks that their requests arrive in the order of the calls.
 *
 * in_order ADDR PORT ROUNDS
 *
 * The program connects without waiting for answers, with a number in the private data of each
 * request. The other end, in the same process, must receive the requests in this order and accepts
 * them. Programs that count their connections depend on this order. Exit status: 0 if all arrived
 * in order.
 */
#include "pair.h"

#define CONNECTIONS 32

static const struct ibv_qp_init_attr small = { .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };

static struct rdma_cm_id *listen_at(struct rdma_event_channel *channel, struct sockaddr_in *address)
{
	struct rdma_cm_id *listener;

	must(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) ||
	     rdma_bind_addr(listener, (struct sockaddr *)address) ||
		     rdma_listen(listener, CONNECTIONS), "listening");
	return listener;
}

/* Returns an identifier that is ready to connect. */
static struct rdma_cm_id *resolved(struct rdma_event_channel *channel, struct sockaddr_in *address)
{
	struct ibv_qp_init_attr attr = small;
	struct rdma_cm_id *id;

	must(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) ||
	     rdma_resolve_addr(id, NULL, (struct sockaddr *)address, 2000), "the address");
	event(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	must(rdma_resolve_route(id, 2000), "the route");
	event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
	must(rdma_create_qp(id, NULL, &attr), "a queue pair");
	return id;
}

/* Takes the next request, and returns its number. */
static int next_request(struct rdma_event_channel *channel, struct rdma_cm_id **id)
{
	struct rdma_cm_event *event;
	int number;

	do {
		must(rdma_get_cm_event(channel, &event), "a request");
		*id = event->id;
		number = -1;
		if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST)
			number = *(const unsigned char *)event->param.conn.private_data;
		must(event->event != RDMA_CM_EVENT_CONNECT_REQUEST &&
		     event->event != RDMA_CM_EVENT_ESTABLISHED, rdma_event_str(event->event));
		rdma_ack_cm_event(event);
	} while (number < 0);
	return number;
}

static void end(struct rdma_event_channel *channel, struct rdma_cm_id *ids[])
{
	for (int i = 0; i < CONNECTIONS; i++)
		rdma_destroy_qp(ids[i]);
	take_events(channel);
	for (int i = 0; i < CONNECTIONS; i++)
		must(rdma_destroy_id(ids[i]), "the end of an identifier");
}

/* Returns the number of requests out of order. */
static int one_round(struct sockaddr_in *address)
{
	struct rdma_event_channel *ours = rdma_create_event_channel(),
		*theirs = rdma_create_event_channel();
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct rdma_cm_id *ids[CONNECTIONS], *accepted[CONNECTIONS], *listener;
	unsigned char number;
	int wrong = 0;

	must(!ours || !theirs, "a channel");
	listener = listen_at(theirs, address);
	for (int i = 0; i < CONNECTIONS; i++)
		ids[i] = resolved(ours, address);
	param.private_data = &number;
	param.private_data_len = sizeof number;
	for (number = 0; number < CONNECTIONS; number++)
		must(rdma_connect(ids[number], &param), "connecting");
	param.private_data_len = 0;
	for (int i = 0; i < CONNECTIONS; i++) {
		struct ibv_qp_init_attr attr = small;
		int said = next_request(theirs, &accepted[i]);

		if (said != i) {
			printf("request %d came as number %d\n", said, i);
			wrong++;
		}
		must(rdma_create_qp(accepted[i], NULL, &attr) || rdma_accept(accepted[i], &param),
		     "accepting");
	}
	for (int i = 0; i < CONNECTIONS; i++)
		event(ours, RDMA_CM_EVENT_ESTABLISHED);
	end(ours, ids);
	end(theirs, accepted);
	must(rdma_destroy_id(listener), "the end of the listener");
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
	must(inet_pton(AF_INET, argv[1], &address.sin_addr) != 1, "the address");
	for (int round = 0; round < atoi(argv[3]) && !wrong; round++)
		wrong = one_round(&address);
	return wrong != 0;
}
