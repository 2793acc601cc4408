/* Connections of the connection manager: events and parameters at each end, how connections begin
 * and end. The argument is the face of the device. */
#include "check.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <unistd.h>

enum { SIZE = 4096, SECOND = 1000, LONG = 20 * SECOND };

static int roce;
static struct rdma_event_channel *servers, *clients;
static struct rdma_cm_id *listener;
static struct sockaddr_in address;

struct end {
	struct rdma_cm_id *id;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	char memory[SIZE];
};

struct pair {
	struct end server, client;
};

static struct rdma_cm_event *event_within(struct rdma_event_channel *channel, int ms)
{
	struct pollfd fd = { .fd = channel->fd, .events = POLLIN };
	struct rdma_cm_event *event;

	if (poll(&fd, 1, ms) != 1)
		return NULL;
	NEED(!rdma_get_cm_event(channel, &event));
	return event;
}

/* Waits for the next event, which must be of this kind. */
static struct rdma_cm_event *expect(struct rdma_event_channel *channel,
	enum rdma_cm_event_type kind)
{
	struct rdma_cm_event *event = event_within(channel, LONG);

	NEED(event);
	if (event->event != kind) {
		fprintf(stderr, "%s instead of %s\n", rdma_event_str(event->event), rdma_event_str(kind));
		exit(2);
	}
	return event;
}

static void take(struct rdma_event_channel *channel, enum rdma_cm_event_type kind)
{
	CODE(0, rdma_ack_cm_event(expect(channel, kind)));
}

/* Takes the event that may follow the end within a second. */
static void take_all(struct rdma_event_channel *channel)
{
	struct rdma_cm_event *event;

	while ((event = event_within(channel, 0)))
		CODE(0, rdma_ack_cm_event(event));
}

static void make_qp(struct end *e)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 16, 16, 1, 1, 64 } };

	NEED(e->cq = ibv_create_cq(e->id->verbs, 64, NULL, NULL, 0));
	attr.send_cq = attr.recv_cq = e->cq;
	NEED(!rdma_create_qp(e->id, NULL, &attr));
	NEED(e->mr = ibv_reg_mr(e->id->pd, e->memory, SIZE, IBV_ACCESS_LOCAL_WRITE));
}

static void unmake(struct end *e)
{
	if (e->mr) {
		rdma_destroy_qp(e->id);
		CODE(0, ibv_dereg_mr(e->mr));
		CODE(0, ibv_destroy_cq(e->cq));
	}
	CODE(0, rdma_destroy_id(e->id));
}

static void unmake_both(struct pair *p)
{
	unmake(&p->server);
	unmake(&p->client);
	take_all(servers);
	take_all(clients);
}

static struct rdma_cm_id *resolved(void)
{
	struct rdma_cm_id *id;

	NEED(!rdma_create_id(clients, &id, NULL, RDMA_PS_TCP));
	NEED(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, LONG));
	take(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
	NEED(!rdma_resolve_route(id, LONG));
	take(clients, RDMA_CM_EVENT_ROUTE_RESOLVED);
	return id;
}

static const struct rdma_conn_param USUAL = { .responder_resources = 4, .initiator_depth = 4,
	.retry_count = 7, .rnr_retry_count = 7 };

static void prepare(struct pair *p)
{
	*p = (struct pair){ 0 };
	p->client.id = resolved();
	make_qp(&p->client);
}

static void ask(struct pair *p, struct rdma_conn_param param)
{
	prepare(p);
	CODE(0, rdma_connect(p->client.id, &param));
}

static void connect_both(struct pair *p, struct rdma_conn_param client,
	struct rdma_conn_param server)
{
	struct rdma_cm_event *event;

	ask(p, client);
	event = expect(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	p->server.id = event->id;
	CODE(0, rdma_ack_cm_event(event));
	make_qp(&p->server);
	CODE(0, rdma_accept(p->server.id, &server));
	take(clients, RDMA_CM_EVENT_ESTABLISHED);
	take(servers, RDMA_CM_EVENT_ESTABLISHED);
}

static void receive(struct end *e, uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)e->memory, SIZE, e->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

	CODE(0, ibv_post_recv(e->id->qp, &wr, &bad));
}

static void post(struct end *e, uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)e->memory, 8, e->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED }, *bad;

	CODE(0, ibv_post_send(e->id->qp, &wr, &bad));
}

static void completes(struct end *e, uint64_t id, enum ibv_wc_status status)
{
	struct ibv_wc wc;
	int i, n = 0;

	for (i = 0; !n && i < LONG; i++) {
		n = ibv_poll_cq(e->cq, 1, &wc);
		if (!n)
			usleep(1000);
	}
	NEED(n == 1);
	CHECK(wc.wr_id == id);
	CODE(status, wc.status);
}

static int is_empty(struct end *e)
{
	struct ibv_wc wc;

	return ibv_poll_cq(e->cq, 1, &wc) == 0;
}

static struct ibv_qp_attr query(struct end *e)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	CODE(0, ibv_query_qp(e->id->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT, &init));
	return attr;
}

static int state(struct end *e)
{
	return query(e).qp_state;
}

/* The depths are negotiated, zero included. Both ends read them from events and their queue pairs.
 * */
static void depths(void)
{
	static const struct {
		int client[2], server[2], asked[2], at_client[2], at_server[2];
	} all[] = {
		/* responder resources and initiator depth: of both programs, the request, and each end's
		 * event */
		{ { 4, 4 }, { 2, 3 }, { 4, 4 }, { 3, 4 }, { 4, 3 } },
		{ { 16, 8 }, { 16, 2 }, { 8, 16 }, { 2, 8 }, { 8, 2 } },
		{ { 0, 0 }, { 0, 0 }, { 0, 0 }, { 0, 0 }, { 0, 0 } },
		{ { 0, 5 }, { 5, 0 }, { 5, 0 }, { 0, 5 }, { 5, 0 } },
		{ { 255, 255 }, { 255, 255 }, { 64, 64 }, { 64, 64 }, { 64, 64 } },
	};
	struct rdma_cm_event *event;
	struct ibv_qp_attr attr;
	struct pair p;
	unsigned i;

	for (i = 0; i < sizeof(all) / sizeof(*all); i++) {
		struct rdma_conn_param client = { .responder_resources = all[i].client[0],
			.initiator_depth = all[i].client[1] };
		struct rdma_conn_param server = { .responder_resources = all[i].server[0],
			.initiator_depth = all[i].server[1] };

		ask(&p, client);
		event = expect(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
		p.server.id = event->id;
		CODE(all[i].asked[0], event->param.conn.responder_resources);
		CODE(all[i].asked[1], event->param.conn.initiator_depth);
		CODE(0, rdma_ack_cm_event(event));
		make_qp(&p.server);
		CODE(0, rdma_accept(p.server.id, &server));
		event = expect(clients, RDMA_CM_EVENT_ESTABLISHED);
		CODE(all[i].at_client[0], event->param.conn.responder_resources);
		CODE(all[i].at_client[1], event->param.conn.initiator_depth);
		CODE(0, rdma_ack_cm_event(event));
		event = expect(servers, RDMA_CM_EVENT_ESTABLISHED);
		CODE(all[i].at_server[0], event->param.conn.responder_resources);
		CODE(all[i].at_server[1], event->param.conn.initiator_depth);
		CODE(0, rdma_ack_cm_event(event));
		attr = query(&p.client);
		CODE(all[i].at_client[0], attr.max_dest_rd_atomic);
		CODE(all[i].at_client[1], attr.max_rd_atomic);
		attr = query(&p.server);
		CODE(all[i].at_server[0], attr.max_dest_rd_atomic);
		CODE(all[i].at_server[1], attr.max_rd_atomic);
		unmake_both(&p);
	}
}

/* Retry counts and queue pair numbers are InfiniBand's. Private data are the program's in any case.
 * */
static void counts_and_numbers(void)
{
	struct rdma_conn_param client = { .retry_count = 5, .rnr_retry_count = 6, .flow_control = 1,
		.private_data = "question",
		.private_data_len = 8 };
	struct rdma_conn_param server = { .rnr_retry_count = 3, .private_data = "answer",
		.private_data_len = 6 };
	struct rdma_cm_event *event;
	const struct rdma_conn_param *got;
	struct ibv_qp_attr attr;
	struct pair p;

	ask(&p, client);
	event = expect(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	p.server.id = event->id;
	got = &event->param.conn;
	CHECK(got->private_data_len == 8 && !memcmp(got->private_data, "question", 8));
	CODE(roce ? 5 : 0, got->retry_count);
	CODE(roce ? 6 : 0, got->rnr_retry_count);
	CODE(roce ? 1 : 0, got->flow_control);
	CODE(0, got->srq);
	CODE(roce ? (int)p.client.id->qp->qp_num : 0, (int)got->qp_num);
	CODE(0, rdma_ack_cm_event(event));
	make_qp(&p.server);
	CODE(IBV_QPS_INIT, p.server.id->qp->state);
	CODE(0, rdma_accept(p.server.id, &server));
	CODE(IBV_QPS_RTS, p.server.id->qp->state);
	CODE(IBV_QPS_INIT, p.client.id->qp->state);
	event = expect(clients, RDMA_CM_EVENT_ESTABLISHED);
	CODE(IBV_QPS_RTS, p.client.id->qp->state);
	got = &event->param.conn;
	CHECK(got->private_data_len == 6 && !memcmp(got->private_data, "answer", 6));
	CODE(0, got->retry_count);
	CODE(roce ? 3 : 0, got->rnr_retry_count);
	CODE(roce ? (int)p.server.id->qp->qp_num : 0, (int)got->qp_num);
	CODE(0, rdma_ack_cm_event(event));
	take(servers, RDMA_CM_EVENT_ESTABLISHED);
	attr = query(&p.client);
	CODE(IBV_QPS_RTS, attr.qp_state);
	CODE(IBV_MTU_4096, attr.path_mtu);
	CODE(roce ? (int)p.server.id->qp->qp_num : 0, (int)attr.dest_qp_num);
	CODE(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		IBV_ACCESS_REMOTE_ATOMIC,
		(int)attr.qp_access_flags);
	if (roce) {
		CODE(3, attr.rnr_retry);
		CODE(5, attr.retry_cnt);
		attr = query(&p.server);
		CODE(6, attr.rnr_retry);
		CODE(5, attr.retry_cnt);
		CODE((int)p.client.id->qp->qp_num, (int)attr.dest_qp_num);
	}
	CODE(0, rdma_disconnect(p.client.id));
	CODE(IBV_QPS_ERR, state(&p.client));
	CODE(IBV_QPS_ERR, p.client.id->qp->state);
	take(clients, RDMA_CM_EVENT_DISCONNECTED);
	take(servers, RDMA_CM_EVENT_DISCONNECTED);
	unmake_both(&p);
}

/* The request of a queue pair with a shared receive queue says so on InfiniBand. */
static void shared_receives(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 4, 0, 1, 0, 0 } };
	struct rdma_conn_param param = USUAL;
	struct rdma_cm_id *id = resolved(), *request;
	struct rdma_cm_event *event;
	struct ibv_cq *cq;

	NEED(cq = ibv_create_cq(id->verbs, 16, NULL, NULL, 0));
	NEED(attr.srq = ibv_create_srq(id->pd, &init));
	attr.send_cq = attr.recv_cq = cq;
	NEED(!rdma_create_qp(id, NULL, &attr));
	CODE(0, rdma_connect(id, &param));
	event = expect(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	CODE(roce ? 1 : 0, event->param.conn.srq);
	CODE(0, rdma_reject(event->id, NULL, 0));
	request = event->id;
	CODE(0, rdma_ack_cm_event(event));
	CODE(0, rdma_destroy_id(request));
	take(clients, RDMA_CM_EVENT_REJECTED);
	rdma_destroy_qp(id);
	CODE(0, ibv_destroy_srq(attr.srq));
	CODE(0, ibv_destroy_cq(cq));
	CODE(0, rdma_destroy_id(id));
}

/* A connection without a message in RTR causes no asynchronous event. */
static void connection_causes_no_event(void)
{
	struct ibv_async_event event;
	struct pair p;

	connect_both(&p, USUAL, USUAL);
	NEED(!fcntl(p.server.id->verbs->async_fd, F_SETFL, O_NONBLOCK));
	receive(&p.server, 1);
	post(&p.client, 2);
	completes(&p.server, 1, IBV_WC_SUCCESS);
	CHECK(ibv_get_async_event(p.server.id->verbs, &event) == -1);
	unmake_both(&p);
}

/* The peer disconnects or is destroyed. Data that has arrived is delivered first. On InfiniBand the
 * queue pair then keeps its state until the program disconnects; iWARP ends it. */
static void peer_ends(int destroys)
{
	struct pair p;

	connect_both(&p, USUAL, USUAL);
	receive(&p.server, 1);
	receive(&p.server, 2);
	post(&p.client, 3);
	completes(&p.client, 3, IBV_WC_SUCCESS);
	if (destroys) {
		unmake(&p.client);
	} else {
		CODE(0, rdma_disconnect(p.client.id));
		take(clients, RDMA_CM_EVENT_DISCONNECTED);
	}
	take(servers, RDMA_CM_EVENT_DISCONNECTED);
	completes(&p.server, 1, IBV_WC_SUCCESS);
	if (roce) {
		usleep(50000);
		CHECK(is_empty(&p.server));
		CODE(IBV_QPS_RTS, state(&p.server));
		post(&p.server, 4);
		post(&p.server, 5);
		completes(&p.server, 4, IBV_WC_RETRY_EXC_ERR);
		completes(&p.server, 5, IBV_WC_WR_FLUSH_ERR);
		completes(&p.server, 2, IBV_WC_WR_FLUSH_ERR);
	} else {
		completes(&p.server, 2, IBV_WC_WR_FLUSH_ERR);
	}
	CODE(IBV_QPS_ERR, state(&p.server));
	CHECK(is_empty(&p.server));
	CODE(0, rdma_disconnect(p.server.id));
	unmake(&p.server);
	if (!destroys)
		unmake(&p.client);
	take_all(servers);
	take_all(clients);
}

/* The program's own disconnect ends a queue pair whose peer has disconnected. */
static void both_ends_disconnect(void)
{
	struct pair p;

	connect_both(&p, USUAL, USUAL);
	receive(&p.server, 1);
	CODE(0, rdma_disconnect(p.client.id));
	take(clients, RDMA_CM_EVENT_DISCONNECTED);
	take(servers, RDMA_CM_EVENT_DISCONNECTED);
	if (roce)
		CHECK(is_empty(&p.server));
	CODE(0, rdma_disconnect(p.server.id));
	completes(&p.server, 1, IBV_WC_WR_FLUSH_ERR);
	CODE(IBV_QPS_ERR, state(&p.server));
	CHECK(is_empty(&p.server));
	unmake_both(&p);
}

/* rnr_retry 7 means no limit. A Send that waits for its receive is not lost with its sender. The
 * process's setting has a short limit. */
static void late_receive(int count, int sender_leaves)
{
	struct rdma_conn_param param = USUAL;
	int waits = roce && count == 7;
	struct pair p;

	param.rnr_retry_count = count;
	connect_both(&p, param, param);
	post(&p.client, 1);
	if (sender_leaves) {
		completes(&p.client, 1, IBV_WC_SUCCESS);
		CODE(0, rdma_disconnect(p.client.id));
		take(clients, RDMA_CM_EVENT_DISCONNECTED);
		take(servers, RDMA_CM_EVENT_DISCONNECTED);
	}
	usleep(500000);
	CODE(waits ? IBV_QPS_RTS : IBV_QPS_ERR, state(&p.server));
	receive(&p.server, 2);
	completes(&p.server, 2, waits ? IBV_WC_SUCCESS : IBV_WC_WR_FLUSH_ERR);
	if (waits && !sender_leaves) {
		receive(&p.client, 3);
		post(&p.server, 4);
		completes(&p.client, 1, IBV_WC_SUCCESS);
		completes(&p.client, 3, IBV_WC_SUCCESS);
	}
	unmake_both(&p);
}

/* Each end of a failed attempt gets its event and its status. */
static void refusals(void)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *request;
	struct sockaddr_in no_listener = address;
	char reasons[148];
	struct pair p;
	int how;

	memset(reasons, 'n', sizeof(reasons));
	for (how = 0; how < 3; how++) {
		int said = how == 0 ? 2 : how == 1 ? 0 : (int)sizeof(reasons);

		ask(&p, USUAL);
		event = expect(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
		request = event->id;
		CODE(0, rdma_ack_cm_event(event));
		if (said)
			CODE(0, rdma_reject(request, reasons, said));
		CODE(0, rdma_destroy_id(request));
		event = expect(clients, RDMA_CM_EVENT_REJECTED);
		CODE(roce ? 28 : -ECONNREFUSED, event->status);
		CODE(said, event->param.conn.private_data_len);
		CHECK(!said || !memcmp(event->param.conn.private_data, reasons, said));
		CODE(0, rdma_ack_cm_event(event));
		CODE(IBV_QPS_ERR, state(&p.client));
		unmake(&p.client);
	}
	/* The port of a socket that does not listen. */
	NEED(!rdma_create_id(servers, &request, NULL, RDMA_PS_TCP));
	no_listener.sin_port = 0;
	NEED(!rdma_bind_addr(request, (struct sockaddr *)&no_listener));
	no_listener.sin_port = rdma_get_src_port(request);
	p.client = (struct end){ 0 };
	NEED(!rdma_create_id(clients, &p.client.id, NULL, RDMA_PS_TCP));
	NEED(!rdma_resolve_addr(p.client.id, NULL, (struct sockaddr *)&no_listener, LONG));
	take(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
	NEED(!rdma_resolve_route(p.client.id, LONG));
	take(clients, RDMA_CM_EVENT_ROUTE_RESOLVED);
	make_qp(&p.client);
	CODE(0, rdma_connect(p.client.id, NULL));
	event = expect(clients, RDMA_CM_EVENT_REJECTED);
	CODE(roce ? 8 : -ECONNREFUSED, event->status);
	CODE(0, rdma_ack_cm_event(event));
	unmake(&p.client);
	CODE(0, rdma_destroy_id(request));
}

/* The initiator gives up before the program has answered. With InfiniBand the program learns this
 * immediately, with iWARP when it accepts. */
static void withdrawn_request(int has_qp)
{
	struct rdma_cm_event *event;
	struct pair p;

	ask(&p, USUAL);
	event = expect(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	p.server.id = event->id;
	CODE(0, rdma_ack_cm_event(event));
	if (has_qp) {
		make_qp(&p.server);
		receive(&p.server, 1);
	}
	unmake(&p.client);
	if (roce) {
		event = expect(servers, RDMA_CM_EVENT_REJECTED);
		CHECK(event->id == p.server.id);
		CODE(4, event->status);
		CODE(0, rdma_ack_cm_event(event));
		if (has_qp)
			completes(&p.server, 1, IBV_WC_WR_FLUSH_ERR);
	} else {
		CHECK(!event_within(servers, 50));
	}
	if (!has_qp)
		make_qp(&p.server);
	MINUS_ONE(roce ? EINVAL : ECONNRESET, rdma_accept(p.server.id, NULL));
	CHECK(!event_within(servers, 50));
	unmake(&p.server);
}

/* An identifier is destroyed while its queue pair is connected: the connection ends, and the queue
 * pair remains. */
static void identifier_ends_before_queue_pair(void)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct ibv_qp *qp;
	struct pair p;

	connect_both(&p, USUAL, USUAL);
	receive(&p.client, 7);
	qp = p.client.id->qp;
	CODE(0, rdma_destroy_id(p.client.id));
	take(servers, RDMA_CM_EVENT_DISCONNECTED);
	completes(&p.client, 7, IBV_WC_WR_FLUSH_ERR);
	CODE(0, ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
	CODE(IBV_QPS_ERR, attr.qp_state);
	CODE(0, ibv_destroy_qp(qp));
	CODE(0, ibv_dereg_mr(p.client.mr));
	CODE(0, ibv_destroy_cq(p.client.cq));
	unmake(&p.server);
}

/* A queue pair fails before the other end's reply arrives. */
static void failed_queue_pair_cannot_connect(void)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct rdma_cm_event *event;
	struct pair p;

	ask(&p, USUAL);
	event = expect(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	p.server.id = event->id;
	CODE(0, rdma_ack_cm_event(event));
	make_qp(&p.server);
	CODE(0, ibv_modify_qp(p.client.id->qp, &attr, IBV_QP_STATE));
	CODE(0, rdma_accept(p.server.id, NULL));
	event = expect(clients, RDMA_CM_EVENT_CONNECT_ERROR);
	CHECK(event->status < 0);
	CODE(0, rdma_ack_cm_event(event));
	CODE(IBV_QPS_ERR, state(&p.client));
	unmake_both(&p);
}

static void backlog_limit(void)
{
	enum { BACKLOG = 2, MANY = 5 };
	struct rdma_cm_id *listens, *requests[BACKLOG];
	struct sockaddr_in before = address;
	struct rdma_conn_param usual = USUAL;
	struct rdma_cm_event *event;
	struct pair p[MANY], again[BACKLOG];
	int i, rejected;

	NEED(!rdma_create_id(servers, &listens, NULL, RDMA_PS_TCP));
	address.sin_port = 0;
	NEED(!rdma_bind_addr(listens, (struct sockaddr *)&address));
	NEED(!rdma_listen(listens, BACKLOG));
	address.sin_port = rdma_get_src_port(listens);
	/* Resolving events come first, because requests are rejected while others are made. */
	for (i = 0; i < MANY; i++)
		prepare(&p[i]);
	for (i = 0; i < MANY; i++)
		CODE(0, rdma_connect(p[i].client.id, &usual));
	for (rejected = 0; rejected < MANY - BACKLOG; rejected++)
		take(clients, RDMA_CM_EVENT_REJECTED);
	for (i = 0; i < BACKLOG; i++) {
		event = expect(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
		requests[i] = event->id;
		CODE(0, rdma_ack_cm_event(event));
	}
	CHECK(!event_within(servers, 0));
	/* Requests that the program has taken do not count, although they are unanswered. */
	for (i = 0; i < BACKLOG; i++)
		ask(&again[i], USUAL);
	for (i = 0; i < BACKLOG; i++) {
		event = expect(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
		again[i].server.id = event->id;
		CODE(0, rdma_ack_cm_event(event));
	}
	for (i = 0; i < BACKLOG; i++) {
		CODE(0, rdma_destroy_id(requests[i]));
		unmake_both(&again[i]);
	}
	for (i = 0; i < MANY; i++)
		unmake(&p[i].client);
	CODE(0, rdma_destroy_id(listens));
	take_all(servers);
	take_all(clients);
	address = before;
}

/* The local port is known once an identifier has an address, and a listener has its device. */
static void ports_and_devices(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET };
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	struct pair p;
	uint16_t port;

	CHECK(listener->verbs && listener->pd && listener->port_num == 1);
	NEED(!rdma_create_id(clients, &id, NULL, RDMA_PS_TCP));
	CODE(0, rdma_get_src_port(id));
	CODE(0, rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, LONG));
	CHECK(rdma_get_src_port(id) != 0);
	take(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
	CODE(0, rdma_destroy_id(id));

	NEED(!rdma_create_id(servers, &id, NULL, RDMA_PS_TCP));
	CODE(0, rdma_bind_addr(id, (struct sockaddr *)&any));
	CHECK(rdma_get_src_port(id) != 0 && !id->verbs);
	CODE(0, rdma_listen(id, 1));
	CHECK(!id->verbs);
	CODE(0, rdma_destroy_id(id));

	ask(&p, USUAL);
	port = rdma_get_src_port(p.client.id);
	event = expect(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	p.server.id = event->id;
	CODE(port, rdma_get_dst_port(p.server.id));
	CODE(0, rdma_ack_cm_event(event));
	unmake_both(&p);
}

static void calls_in_the_wrong_state(void)
{
	struct rdma_cm_id *id;
	struct pair p;

	MINUS_ONE(EINVAL, rdma_get_cm_event(clients, NULL));
	MINUS_ONE(EINVAL, rdma_get_cm_event(NULL, NULL));
	NEED(!rdma_create_id(clients, &id, NULL, RDMA_PS_TCP));
	MINUS_ONE(EINVAL, rdma_notify(id, IBV_EVENT_COMM_EST));
	MINUS_ONE(EINVAL, rdma_establish(id));
	CODE(0, rdma_destroy_id(id));
	id = resolved();
	MINUS_ONE(EINVAL, rdma_notify(id, IBV_EVENT_COMM_EST));
	MINUS_ONE(EINVAL, rdma_establish(id));
	CODE(0, rdma_destroy_id(id));
	connect_both(&p, USUAL, USUAL);
	MINUS_ONE(EINVAL, rdma_notify(p.server.id, IBV_EVENT_QP_FATAL));
	if (roce)
		MINUS_ONE(EISCONN, rdma_notify(p.server.id, IBV_EVENT_COMM_EST));
	else
		CODE(0, rdma_notify(p.server.id, IBV_EVENT_COMM_EST));
	MINUS_ONE(EINVAL, rdma_establish(p.server.id));
	unmake_both(&p);
}

/* A refused attempt without a queue pair does not affect the next one with a queue pair. */
static void refused_attempt_has_no_effect(void)
{
	struct rdma_conn_param early = USUAL, usual = USUAL;
	struct rdma_cm_event *event;
	struct pair p = { 0 };

	early.qp_num = 0xfffffe;
	NEED(!rdma_create_id(clients, &p.client.id, NULL, RDMA_PS_TCP));
	NEED(!rdma_resolve_addr(p.client.id, NULL, (struct sockaddr *)&address, LONG));
	take(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
	MINUS_ONE(EINVAL, rdma_connect(p.client.id, &early));
	NEED(!rdma_resolve_route(p.client.id, LONG));
	take(clients, RDMA_CM_EVENT_ROUTE_RESOLVED);
	make_qp(&p.client);
	CODE(0, rdma_connect(p.client.id, &usual));
	event = expect(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	p.server.id = event->id;
	CODE(0, rdma_ack_cm_event(event));
	make_qp(&p.server);
	CODE(0, rdma_accept(p.server.id, &usual));
	take(clients, RDMA_CM_EVENT_ESTABLISHED);
	unmake_both(&p);
}

static struct rdma_cm_event *unacknowledged;

static void *acknowledge_later(void *arg)
{
	(void)arg;
	usleep(200000);
	/* Stored before the call, because the identifier may be destroyed afterwards. */
	__atomic_store_n(&unacknowledged->status, 77, __ATOMIC_SEQ_CST);
	CODE(0, rdma_ack_cm_event(unacknowledged));
	return NULL;
}

static void destroy_waits(void)
{
	static volatile int done;
	struct rdma_cm_id *id;
	pthread_t thread;

	NEED(!rdma_create_id(clients, &id, NULL, RDMA_PS_TCP));
	NEED(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, LONG));
	unacknowledged = expect(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
	NEED(!pthread_create(&thread, NULL, acknowledge_later, NULL));
	CODE(0, rdma_destroy_id(id));
	done = 1;
	NEED(!pthread_join(thread, NULL));
	CHECK(done);
}

/* Options: in which states they are accepted, and the time-out that the queue pair reports. */

enum place { IDLE, BOUND, LISTENS, RESOLVED, WITH_QP, CONNECTED, ACCEPTED, REQUESTED, PLACES };

static struct rdma_cm_id *at(enum place place, struct pair *p)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr = address.sin_addr };
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	*p = (struct pair){ 0 };
	switch (place) {
	case RESOLVED:
		return p->client.id = resolved();
	case WITH_QP:
		p->client.id = resolved();
		make_qp(&p->client);
		return p->client.id;
	case CONNECTED:
	case ACCEPTED:
		connect_both(p, USUAL, USUAL);
		return place == CONNECTED ? p->client.id : p->server.id;
	case REQUESTED:
		ask(p, USUAL);
		event = expect(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
		p->server.id = event->id;
		CODE(0, rdma_ack_cm_event(event));
		return p->server.id;
	default:
		break;
	}
	NEED(!rdma_create_id(clients, &id, NULL, RDMA_PS_TCP));
	if (place != IDLE)
		NEED(!rdma_bind_addr(id, (struct sockaddr *)&any));
	if (place == LISTENS)
		NEED(!rdma_listen(id, 1));
	return p->client.id = id;
}

static void finish(struct pair *p)
{
	if (p->client.id)
		unmake(&p->client);
	if (p->server.id)
		unmake(&p->server);
	take_all(servers);
	take_all(clients);
}

static void options(void)
{
	static const struct {
		int name;
		size_t len;
		int value;
		/* The places where it is accepted: a bit for each. */
		unsigned taken;
	} all[] = {
		{ RDMA_OPTION_ID_TOS, 1, 32, ~0u },
		{ RDMA_OPTION_ID_TOS, 4, 32, 0 },
		{ RDMA_OPTION_ID_REUSEADDR, 4, 1, ~(1u << LISTENS) },
		{ RDMA_OPTION_ID_REUSEADDR, 4, 0, 1u << IDLE },
		{ RDMA_OPTION_ID_REUSEADDR, 1, 1, 0 },
		{ RDMA_OPTION_ID_AFONLY, 4, 1, 1u << IDLE | 1u << BOUND },
		{ RDMA_OPTION_ID_AFONLY, 4, 0, 1u << IDLE | 1u << BOUND },
		{ RDMA_OPTION_ID_AFONLY, 1, 1, 0 },
		{ RDMA_OPTION_ID_ACK_TIMEOUT, 1, 0, ~0u },
		{ RDMA_OPTION_ID_ACK_TIMEOUT, 1, 19, ~0u },
		{ RDMA_OPTION_ID_ACK_TIMEOUT, 1, 31, ~0u },
		{ RDMA_OPTION_ID_ACK_TIMEOUT, 1, 32, 0 },
		{ RDMA_OPTION_ID_ACK_TIMEOUT, 4, 19, 0 },
	};
	enum place place;
	struct pair p;
	unsigned i;

	for (place = IDLE; place < PLACES; place++) {
		struct rdma_cm_id *id = at(place, &p);

		for (i = 0; i < sizeof(all) / sizeof(*all); i++) {
			int value = all[i].value;

			/* On little-endian machines the first byte has the value. */
			if (all[i].taken & 1u << place)
				CODE(0, rdma_set_option(id, RDMA_OPTION_ID, all[i].name, &value, all[i].len));
			else
				MINUS_ONE(EINVAL, rdma_set_option(id, RDMA_OPTION_ID, all[i].name, &value, all[i].len));
		}
		MINUS_ONE(ENOSYS, rdma_set_option(id, RDMA_OPTION_ID, 99, &i, 4));
		MINUS_ONE(ENOSYS, rdma_set_option(id, 99, RDMA_OPTION_ID_TOS, &i, 1));
		MINUS_ONE(EINVAL, rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, NULL, 1));
		finish(&p);
	}
}

/* The time-out may be set before and after the queue pair is created, and twice. A listener's does
 * not apply to its connections. */
static void time_outs(void)
{
	uint8_t first = 10, second = 5, other = 20;
	struct rdma_cm_event *event;
	struct pair p;
	int before;

	CODE(0, rdma_set_option(listener, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &other, 1));
	for (before = 0; before < 2; before++) {
		p = (struct pair){ 0 };
		p.client.id = resolved();
		if (before)
			CODE(0, rdma_set_option(p.client.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &first, 1));
		make_qp(&p.client);
		if (!before)
			CODE(0, rdma_set_option(p.client.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &first, 1));
		CODE(0, rdma_connect(p.client.id, NULL));
		event = expect(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
		p.server.id = event->id;
		CODE(0, rdma_ack_cm_event(event));
		make_qp(&p.server);
		CODE(0, rdma_accept(p.server.id, NULL));
		take(clients, RDMA_CM_EVENT_ESTABLISHED);
		take(servers, RDMA_CM_EVENT_ESTABLISHED);
		CODE(first, query(&p.client).timeout);
		CODE(roce ? 14 : 0, query(&p.server).timeout);
		CODE(0, rdma_set_option(p.server.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &second, 1));
		CODE(second, query(&p.server).timeout);
		CODE(first, query(&p.client).timeout);
		unmake_both(&p);
	}
}

int main(int argc, char **argv)
{
	roce = argc > 1 && !strcmp(argv[1], "roce");
	/* A limit that rnr_retry 7 ignores. */
	setenv("IWARP_RNR_TIMEOUT_MS", "100", 1);
	address.sin_family = AF_INET;
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	NEED(servers = rdma_create_event_channel());
	NEED(clients = rdma_create_event_channel());
	NEED(!rdma_create_id(servers, &listener, NULL, RDMA_PS_TCP));
	NEED(!rdma_bind_addr(listener, (struct sockaddr *)&address));
	NEED(!rdma_listen(listener, 0));
	address.sin_port = rdma_get_src_port(listener);

	depths();
	counts_and_numbers();
	shared_receives();
	connection_causes_no_event();
	peer_ends(0);
	peer_ends(1);
	both_ends_disconnect();
	late_receive(7, 0);
	late_receive(6, 0);
	if (roce)
		late_receive(7, 1);
	refusals();
	withdrawn_request(0);
	withdrawn_request(1);
	identifier_ends_before_queue_pair();
	failed_queue_pair_cannot_connect();
	backlog_limit();
	ports_and_devices();
	calls_in_the_wrong_state();
	refused_attempt_has_no_effect();
	destroy_waits();
	options();
	time_outs();

	CODE(0, rdma_destroy_id(listener));
	rdma_destroy_event_channel(servers);
	rdma_destroy_event_channel(clients);
	return result();
}
