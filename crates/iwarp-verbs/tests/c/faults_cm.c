/* Tests of injected faults through the connection manager: failed connection attempts and ended
 * connections. */
#include "check.h"

#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

static void expect_event(struct rdma_event_channel *channel, enum rdma_cm_event_type type,
	int status)
{
	struct rdma_cm_event *event;

	NEED(rdma_get_cm_event(channel, &event) == 0);
	CODE((int)type, (int)event->event);
	CODE(status, event->status);
	CODE(0, rdma_ack_cm_event(event));
}

static struct rdma_event_channel *channel, *listening;
static struct sockaddr_in to = { .sin_family = AF_INET };
static struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };

static void create_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };

	NEED(rdma_create_qp(id, NULL, &attr) == 0);
}

static struct rdma_cm_id *start_connecting(void)
{
	struct rdma_cm_id *id;

	NEED(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	NEED(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 1000) == 0);
	expect_event(channel, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
	NEED(rdma_resolve_route(id, 1000) == 0);
	expect_event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
	create_qp(id);
	NEED(rdma_connect(id, &param) == 0);
	return id;
}

static void destroy_with_qp(struct rdma_cm_id *id)
{
	rdma_destroy_qp(id);
	CODE(0, rdma_destroy_id(id));
}

/* Connects, and sends one message. A fault of this message ends the connection. */
static void test_send_ends_connection(int status)
{
	struct ibv_send_wr wr = { .wr_id = 5, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED },
		*bad;
	struct rdma_cm_id *id = start_connecting(), *server;
	struct rdma_cm_event *event;
	struct ibv_wc wc;
	int n;

	NEED(rdma_get_cm_event(listening, &event) == 0);
	CODE(RDMA_CM_EVENT_CONNECT_REQUEST, (int)event->event);
	server = event->id;
	NEED(rdma_ack_cm_event(event) == 0);
	create_qp(server);
	NEED(rdma_accept(server, &param) == 0);
	expect_event(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	expect_event(listening, RDMA_CM_EVENT_ESTABLISHED, 0);
	CODE(0, ibv_post_send(id->qp, &wr, &bad));
	expect_event(channel, RDMA_CM_EVENT_DISCONNECTED, status);
	expect_event(listening, RDMA_CM_EVENT_DISCONNECTED, status);
	while ((n = ibv_poll_cq(id->send_cq, 1, &wc)) == 0)
		;
	CODE(1, n);
	CODE(5, (int)wc.wr_id);
	destroy_with_qp(id);
	destroy_with_qp(server);
}

/* The connection manager opens its device once, so one specification contains all faults. */
int main(void)
{
	struct rdma_cm_id *id, *server;

	to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	setenv("IWARP_FAULT",
		"seed=1;refuse,nth=1;unreachable,nth=1;close,op=send,qp=3;reset,op=send,qp=5;"
		"status=LOC_QP_OP_ERR,op=send,qp=7;reset,time=1000s", 1);
	listening = rdma_create_event_channel();
	channel = rdma_create_event_channel();
	NEED(channel && listening && rdma_create_id(listening, &server, NULL, RDMA_PS_TCP) == 0);
	NEED(rdma_bind_addr(server, (struct sockaddr *)&to) == 0 && rdma_listen(server, 4) == 0);
	to.sin_port = rdma_get_src_port(server);
	id = start_connecting();
	expect_event(channel, RDMA_CM_EVENT_REJECTED, -ECONNREFUSED);
	destroy_with_qp(id);
	id = start_connecting();
	expect_event(channel, RDMA_CM_EVENT_UNREACHABLE, -EHOSTUNREACH);
	destroy_with_qp(id);
	test_send_ends_connection(0);
	test_send_ends_connection(-ECONNRESET);
	test_send_ends_connection(0);
	CODE(0, rdma_destroy_id(server));
	rdma_destroy_event_channel(channel);
	rdma_destroy_event_channel(listening);
	return result();
}
