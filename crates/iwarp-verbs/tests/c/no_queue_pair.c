/* Tests of connections without a queue pair. UCX establishes such connections on a RoCE NIC (the
 * argument "roce"). It passes the number of a datagram queue pair, exchanges private data, and gets
 * an event when the peer disconnects. An iWARP NIC refuses such connections. */
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <unistd.h>

#include "check.h"

enum { PRIVATE = 56, DEPTH = 3, QUIET_MS = 50 };

static int roce;
static struct rdma_event_channel *channel;

enum ending { CLIENT_DISCONNECTS, SERVER_DISCONNECTS, CLIENT_IS_DESTROYED, SERVER_IS_DESTROYED };

/* Whether the last event reported that the peer has a shared receive queue. */
static int srq_reported;

static struct rdma_cm_id *expect_event(enum rdma_cm_event_type want, const char *private)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	NEED(rdma_get_cm_event(channel, &event) == 0);
	if (event->event != want)
		fprintf(stderr, "%s instead of %s\n", rdma_event_str(event->event), rdma_event_str(want));
	CHECK(event->event == want);
	if (private) {
		CHECK(event->param.conn.private_data_len >= PRIVATE);
		CHECK(event->param.conn.private_data && strcmp(event->param.conn.private_data, private) == 0);
		CHECK(event->param.conn.responder_resources == DEPTH &&
			event->param.conn.initiator_depth == DEPTH);
	}
	id = event->id;
	srq_reported = event->param.conn.srq;
	NEED(rdma_ack_cm_event(event) == 0);
	return id;
}

static int has_no_event(void)
{
	struct pollfd fd = { .fd = channel->fd, .events = POLLIN };

	return poll(&fd, 1, QUIET_MS) == 0;
}

/* Creates a queue pair on the identifier's context. Only its number is used. */
static struct ibv_qp *create_unused_qp(struct rdma_cm_id *id)
{
	struct ibv_cq *cq = ibv_create_cq(id->verbs, 1, NULL, NULL, 0);
	struct ibv_qp_init_attr attr = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_UD, };
	struct ibv_qp *qp;

	NEED(cq && id->pd);
	qp = ibv_create_qp(id->pd, &attr);
	NEED(qp);
	return qp;
}

static void destroy_qp_and_cq(struct ibv_qp *qp)
{
	struct ibv_cq *cq = qp->send_cq;

	CODE(0, ibv_destroy_qp(qp));
	CODE(0, ibv_destroy_cq(cq));
}

static struct rdma_conn_param parameters(struct ibv_qp *qp, const char *private)
{
	struct rdma_conn_param param = {
		.private_data = private,
		.private_data_len = PRIVATE,
		.responder_resources = DEPTH,
		.initiator_depth = DEPTH,
		/* No queue pair of this process has this number. */
		.qp_num = qp ? qp->qp_num : 0xfffffe,
	};

	return param;
}

static struct rdma_cm_id *resolve(struct sockaddr_in *addr)
{
	struct rdma_cm_id *id;

	NEED(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	NEED(rdma_resolve_addr(id, NULL, (struct sockaddr *)addr, 1000) == 0);
	expect_event(RDMA_CM_EVENT_ADDR_RESOLVED, NULL);
	NEED(rdma_resolve_route(id, 1000) == 0);
	expect_event(RDMA_CM_EVENT_ROUTE_RESOLVED, NULL);
	return id;
}

static void end_connection(struct rdma_cm_id *client, struct rdma_cm_id *server, enum ending ending)
{
	int client_first = ending == CLIENT_DISCONNECTS || ending == CLIENT_IS_DESTROYED;
	struct rdma_cm_id *first = client_first ? client : server, *other = client_first ? server : client;

	if (ending == CLIENT_DISCONNECTS || ending == SERVER_DISCONNECTS) {
		CODE(0, rdma_disconnect(first));
		expect_event(RDMA_CM_EVENT_DISCONNECTED, NULL);
		expect_event(RDMA_CM_EVENT_DISCONNECTED, NULL);
		CODE(0, rdma_disconnect(other));
		NEED(rdma_destroy_id(first) == 0);
	} else {
		NEED(rdma_destroy_id(first) == 0);
		CHECK(expect_event(RDMA_CM_EVENT_DISCONNECTED, NULL) == other);
	}
	NEED(rdma_destroy_id(other) == 0);
}

static void test_connection(struct sockaddr_in *addr, enum ending ending)
{
	char asks[PRIVATE] = "what the client says", answers[PRIVATE] = "what the server says";
	struct rdma_cm_id *client = resolve(addr), *server;
	struct ibv_qp *a = create_unused_qp(client), *b;
	struct rdma_conn_param param = parameters(a, asks);

	if (!roce) {
		MINUS_ONE(EINVAL, rdma_connect(client, &param));
		destroy_qp_and_cq(a);
		NEED(rdma_destroy_id(client) == 0);
		return;
	}
	MINUS_ONE(EINVAL, rdma_connect(client, NULL));
	param.srq = ending % 2;
	CODE(0, rdma_connect(client, &param));
	server = expect_event(RDMA_CM_EVENT_CONNECT_REQUEST, asks);
	CODE(ending % 2, srq_reported);
	b = ending == SERVER_IS_DESTROYED ? NULL : create_unused_qp(server);
	param = parameters(b, answers);
	param.srq = 1 - ending % 2;
	MINUS_ONE(EINVAL, rdma_accept(server, NULL));
	CODE(0, rdma_accept(server, &param));
	CHECK(expect_event(RDMA_CM_EVENT_CONNECT_RESPONSE, answers) == client);
	CODE(1 - ending % 2, srq_reported);
	/* The server may use the connection only after the client has confirmed it. */
	CHECK(has_no_event());
	CODE(0, rdma_establish(client));
	CHECK(expect_event(RDMA_CM_EVENT_ESTABLISHED, NULL) == server);
	CHECK(client->qp == NULL && server->qp == NULL);
	/* Destroying the queue pairs whose numbers were passed does not end the connection. */
	destroy_qp_and_cq(a);
	if (b)
		destroy_qp_and_cq(b);
	CHECK(has_no_event());
	end_connection(client, server, ending);
}

/* The client does not confirm the connection that the server has accepted. */
static void test_unconfirmed_connection(struct sockaddr_in *addr, int variant)
{
	char asks[PRIVATE] = "may I?", answers[PRIVATE] = "you may";
	struct rdma_cm_id *client = resolve(addr), *server;
	struct rdma_conn_param param = parameters(NULL, asks);

	CODE(0, rdma_connect(client, &param));
	server = expect_event(RDMA_CM_EVENT_CONNECT_REQUEST, asks);
	param = parameters(NULL, answers);
	CODE(0, rdma_accept(server, &param));
	CHECK(expect_event(RDMA_CM_EVENT_CONNECT_RESPONSE, answers) == client);
	switch (variant) {
	case 0:
		CODE(0, rdma_disconnect(client));
		CHECK(expect_event(RDMA_CM_EVENT_DISCONNECTED, NULL) == client);
		break;
	case 1:
		CODE(0, rdma_reject(client, NULL, 0));
		break;
	case 2:
		NEED(rdma_destroy_id(client) == 0);
		break;
	case 3:
		NEED(rdma_destroy_id(server) == 0);
		CODE(0, rdma_establish(client));
		CHECK(expect_event(RDMA_CM_EVENT_DISCONNECTED, NULL) == client);
		NEED(rdma_destroy_id(client) == 0);
		return;
	}
	CHECK(expect_event(RDMA_CM_EVENT_CONNECT_ERROR, NULL) == server);
	NEED(rdma_destroy_id(server) == 0 && (variant == 2 || rdma_destroy_id(client) == 0));
}

/* Only the client has a queue pair, and it sends. The server cannot receive the message, so the
 * connection ends. */
static void test_peer_with_queue_pair(struct sockaddr_in *addr)
{
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1,
	};
	struct rdma_cm_id *client = resolve(addr), *server;
	char asks[PRIVATE] = "a real one", answers[PRIVATE] = "none";
	struct rdma_conn_param param = parameters(NULL, asks);
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .wr_id = 1 }, *bad;

	NEED(rdma_create_qp(client, client->pd, &attr) == 0);
	CODE(0, rdma_connect(client, &param));
	server = expect_event(RDMA_CM_EVENT_CONNECT_REQUEST, asks);
	param = parameters(NULL, answers);
	CODE(0, rdma_accept(server, &param));
	expect_event(RDMA_CM_EVENT_ESTABLISHED, NULL);
	expect_event(RDMA_CM_EVENT_ESTABLISHED, NULL);
	CODE(0, ibv_post_send(client->qp, &wr, &bad));
	expect_event(RDMA_CM_EVENT_DISCONNECTED, NULL);
	expect_event(RDMA_CM_EVENT_DISCONNECTED, NULL);
	rdma_destroy_qp(client);
	NEED(rdma_destroy_id(client) == 0 && rdma_destroy_id(server) == 0);
}

/* A rejected identifier can connect again without a queue pair. Then the client withdraws its
 * second request. */
static void test_reconnect_after_rejection(struct sockaddr_in *addr)
{
	char asks[PRIVATE] = "first", again[PRIVATE] = "second", no[PRIVATE] = "no";
	struct rdma_cm_id *client = resolve(addr), *server;
	struct rdma_conn_param param = parameters(NULL, asks);
	struct rdma_cm_event *last_event;

	CODE(0, rdma_connect(client, &param));
	server = expect_event(RDMA_CM_EVENT_CONNECT_REQUEST, asks);
	CODE(0, rdma_reject(server, no, PRIVATE));
	NEED(rdma_get_cm_event(channel, &last_event) == 0);
	CHECK(last_event->event == RDMA_CM_EVENT_REJECTED && strcmp(last_event->param.conn.private_data,
		no) == 0);
	NEED(rdma_ack_cm_event(last_event) == 0 && rdma_destroy_id(server) == 0);
	param = parameters(NULL, again);
	CODE(0, rdma_connect(client, &param));
	server = expect_event(RDMA_CM_EVENT_CONNECT_REQUEST, again);
	NEED(rdma_destroy_id(client) == 0);
	param = parameters(NULL, again);
	/* The server may or may not have noticed the withdrawal already. */
	if (rdma_accept(server, &param) == 0) {
		NEED(rdma_get_cm_event(channel, &last_event) == 0);
		CHECK(last_event->event != RDMA_CM_EVENT_ESTABLISHED && last_event->id == server);
		NEED(rdma_ack_cm_event(last_event) == 0);
	}
	NEED(rdma_destroy_id(server) == 0);
}

int main(int argc, char **argv)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct rdma_cm_id *listener;
	enum ending ending;
	int variant;

	roce = argc > 1 && strcmp(argv[1], "roce") == 0;
	channel = rdma_create_event_channel();
	NEED(channel && rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) == 0);
	NEED(rdma_bind_addr(listener, (struct sockaddr *)&addr) == 0 && rdma_listen(listener, 1) == 0);
	addr.sin_port = rdma_get_src_port(listener);
	for (ending = CLIENT_DISCONNECTS; ending <= SERVER_IS_DESTROYED; ending++)
		test_connection(&addr, ending);
	if (roce) {
		for (variant = 0; variant < 4; variant++)
			test_unconfirmed_connection(&addr, variant);
		test_peer_with_queue_pair(&addr);
		test_reconnect_after_rejection(&addr);
	}
	NEED(rdma_destroy_id(listener) == 0);
	rdma_destroy_event_channel(channel);
	return result();
}
