/* Lesson 7: connects step by step, and prints each event of the connection manager.
 *
 * usage: cm_events          waits for one client on port 7471
 *        cm_events HOST     connects to the server on HOST, and disconnects */
#include "lesson.h"
#include <netdb.h>
#include <rdma/rdma_cma.h>

#define PORT "7471"

static struct rdma_event_channel *channel;

/* Waits for the next event, which must be the expected one, and returns its identifier. A new
 * connection has a new identifier; the listener keeps its own. */
static struct rdma_cm_id *expect(enum rdma_cm_event_type expected)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	check(rdma_get_cm_event(channel, &event), "rdma_get_cm_event");
	id = event->id;
	printf("event: %s", rdma_event_str(event->event));
	/* Hardware may add zeros to the private data, so only its beginning counts. */
	if (event->param.conn.private_data_len >= 5)
		printf(" with '%.5s'", (const char *)event->param.conn.private_data);
	printf("\n");
	if (event->event != expected) {
		fprintf(stderr, "expected %s, status %d\n", rdma_event_str(expected), event->status);
		exit(1);
	}
	rdma_ack_cm_event(event);
	return id;
}

/* Gives the identifier a queue pair. rdma_cm moves it through its states. */
static void create_queue_pair(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = {
		.qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
	};

	check(rdma_create_qp(id, NULL, &attr), "rdma_create_qp");
	printf("queue pair on %s\n", ibv_get_device_name(id->verbs->device));
}

static void serve(struct rdma_cm_id *listener, struct sockaddr *address)
{
	struct rdma_conn_param param = {.private_data = "reply", .private_data_len = 5};
	struct rdma_cm_id *id;

	check(rdma_bind_addr(listener, address), "rdma_bind_addr");
	check(rdma_listen(listener, 1), "rdma_listen");
	id = expect(RDMA_CM_EVENT_CONNECT_REQUEST);
	create_queue_pair(id);
	check(rdma_accept(id, &param), "rdma_accept");
	expect(RDMA_CM_EVENT_ESTABLISHED);
	expect(RDMA_CM_EVENT_DISCONNECTED);
	rdma_disconnect(id);
	rdma_destroy_qp(id);
	rdma_destroy_id(id);
}

static void use(struct rdma_cm_id *id, struct sockaddr *address)
{
	struct rdma_conn_param param = {.private_data = "hello", .private_data_len = 5};

	check(rdma_resolve_addr(id, NULL, address, 2000), "rdma_resolve_addr");
	expect(RDMA_CM_EVENT_ADDR_RESOLVED);
	check(rdma_resolve_route(id, 2000), "rdma_resolve_route");
	expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
	create_queue_pair(id);
	check(rdma_connect(id, &param), "rdma_connect");
	expect(RDMA_CM_EVENT_ESTABLISHED);
	check(rdma_disconnect(id), "rdma_disconnect");
	expect(RDMA_CM_EVENT_DISCONNECTED);
	rdma_destroy_qp(id);
}

int main(int argc, char **argv)
{
	const char *host = argc > 1 ? argv[1] : NULL;
	struct addrinfo hints = {.ai_family = AF_INET, .ai_flags = AI_PASSIVE}, *found;
	struct rdma_cm_id *id;
	int error = getaddrinfo(host, PORT, &hints, &found);

	if (error) {
		fprintf(stderr, "%s: %s\n", host ? host : PORT, gai_strerror(error));
		return 1;
	}
	channel = created(rdma_create_event_channel(), "rdma_create_event_channel");
	check(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "rdma_create_id");
	if (host)
		use(id, found->ai_addr);
	else
		serve(id, found->ai_addr);
	rdma_destroy_id(id);
	rdma_destroy_event_channel(channel);
	freeaddrinfo(found);
	return 0;
}
