/* Tests of the connection manager: how connections begin and end, with events and parameters at
 * each end. The argument is the face of the device. */
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

enum { SIZE = 4096, SECOND = 1000, TIMEOUT_MS = 20 * SECOND };

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

/* Waits for the next event. Exits if it has another type. */
static struct rdma_cm_event *next_event(struct rdma_event_channel *channel,
	enum rdma_cm_event_type kind)
{
	struct rdma_cm_event *event = event_within(channel, TIMEOUT_MS);

	NEED(event);
	if (event->event != kind) {
		fprintf(stderr, "%s instead of %s\n", rdma_event_str(event->event), rdma_event_str(kind));
		exit(2);
	}
	return event;
}

static void acknowledge_event(struct rdma_event_channel *channel, enum rdma_cm_event_type kind)
{
	CODE(0, rdma_ack_cm_event(next_event(channel, kind)));
}

/* Acknowledges all pending events, for example those that follow the end of a connection. */
static void acknowledge_pending_events(struct rdma_event_channel *channel)
{
	struct rdma_cm_event *event;

	while ((event = event_within(channel, 0)))
		CODE(0, rdma_ack_cm_event(event));
}

static void create_qp(struct end *e)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 16, 16, 1, 1, 64 } };

	NEED(e->cq = ibv_create_cq(e->id->verbs, 64, NULL, NULL, 0));
	attr.send_cq = attr.recv_cq = e->cq;
	NEED(!rdma_create_qp(e->id, NULL, &attr));
	NEED(e->mr = ibv_reg_mr(e->id->pd, e->memory, SIZE, IBV_ACCESS_LOCAL_WRITE));
}

static void destroy_end(struct end *e)
{
	if (e->mr) {
		rdma_destroy_qp(e->id);
		CODE(0, ibv_dereg_mr(e->mr));
		CODE(0, ibv_destroy_cq(e->cq));
	}
	CODE(0, rdma_destroy_id(e->id));
}

static void destroy_pair(struct pair *p)
{
	destroy_end(&p->server);
	destroy_end(&p->client);
	acknowledge_pending_events(servers);
	acknowledge_pending_events(clients);
}

static struct rdma_cm_id *create_resolved_id(void)
{
	struct rdma_cm_id *id;

	NEED(!rdma_create_id(clients, &id, NULL, RDMA_PS_TCP));
	NEED(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, TIMEOUT_MS));
	acknowledge_event(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
	NEED(!rdma_resolve_route(id, TIMEOUT_MS));
	acknowledge_event(clients, RDMA_CM_EVENT_ROUTE_RESOLVED);
	return id;
}

static const struct rdma_conn_param DEFAULTS = { .responder_resources = 4, .initiator_depth = 4,
	.retry_count = 7, .rnr_retry_count = 7 };

static void prepare(struct pair *p)
{
	*p = (struct pair){ 0 };
	p->client.id = create_resolved_id();
	create_qp(&p->client);
}

static void request_connection(struct pair *p, struct rdma_conn_param param)
{
	prepare(p);
	CODE(0, rdma_connect(p->client.id, &param));
}

static void connect_both(struct pair *p, struct rdma_conn_param client,
	struct rdma_conn_param server)
{
	struct rdma_cm_event *event;

	request_connection(p, client);
	event = next_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	p->server.id = event->id;
	CODE(0, rdma_ack_cm_event(event));
	create_qp(&p->server);
	CODE(0, rdma_accept(p->server.id, &server));
	acknowledge_event(clients, RDMA_CM_EVENT_ESTABLISHED);
	acknowledge_event(servers, RDMA_CM_EVENT_ESTABLISHED);
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

static void expect_completion(struct end *e, uint64_t id, enum ibv_wc_status status)
{
	struct ibv_wc wc;
	int i, n = 0;

	for (i = 0; !n && i < TIMEOUT_MS; i++) {
		n = ibv_poll_cq(e->cq, 1, &wc);
		if (!n)
			usleep(1000);
	}
	NEED(n == 1);
	CHECK(wc.wr_id == id);
	CODE(status, wc.status);
}

static int has_no_completion(struct end *e)
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

/* The depths are negotiated, and may be zero. At both ends, events and queue pairs report them. */
static void test_depths(void)
{
	static const struct {
		int client[2], server[2], asked[2], at_client[2], at_server[2];
	} all[] = {
		/* responder resources and initiator depth: passed by each program, and reported in the
		 * request and in the event at each end */
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

		request_connection(&p, client);
		event = next_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
		p.server.id = event->id;
		CODE(all[i].asked[0], event->param.conn.responder_resources);
		CODE(all[i].asked[1], event->param.conn.initiator_depth);
		CODE(0, rdma_ack_cm_event(event));
		create_qp(&p.server);
		CODE(0, rdma_accept(p.server.id, &server));
		event = next_event(clients, RDMA_CM_EVENT_ESTABLISHED);
		CODE(all[i].at_client[0], event->param.conn.responder_resources);
		CODE(all[i].at_client[1], event->param.conn.initiator_depth);
		CODE(0, rdma_ack_cm_event(event));
		event = next_event(servers, RDMA_CM_EVENT_ESTABLISHED);
		CODE(all[i].at_server[0], event->param.conn.responder_resources);
		CODE(all[i].at_server[1], event->param.conn.initiator_depth);
		CODE(0, rdma_ack_cm_event(event));
		attr = query(&p.client);
		CODE(all[i].at_client[0], attr.max_dest_rd_atomic);
		CODE(all[i].at_client[1], attr.max_rd_atomic);
		attr = query(&p.server);
		CODE(all[i].at_server[0], attr.max_dest_rd_atomic);
		CODE(all[i].at_server[1], attr.max_rd_atomic);
		destroy_pair(&p);
	}
}

/* Events report retry counts and queue pair numbers with the RoCE face only, and private data with
 * both faces. */
static void test_parameters(void)
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

	request_connection(&p, client);
	event = next_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	p.server.id = event->id;
	got = &event->param.conn;
	CHECK(got->private_data_len == 8 && !memcmp(got->private_data, "question", 8));
	CODE(roce ? 5 : 0, got->retry_count);
	CODE(roce ? 6 : 0, got->rnr_retry_count);
	CODE(roce ? 1 : 0, got->flow_control);
	CODE(0, got->srq);
	CODE(roce ? (int)p.client.id->qp->qp_num : 0, (int)got->qp_num);
	CODE(0, rdma_ack_cm_event(event));
	create_qp(&p.server);
	CODE(IBV_QPS_INIT, p.server.id->qp->state);
	CODE(0, rdma_accept(p.server.id, &server));
	CODE(IBV_QPS_RTS, p.server.id->qp->state);
	CODE(IBV_QPS_INIT, p.client.id->qp->state);
	event = next_event(clients, RDMA_CM_EVENT_ESTABLISHED);
	CODE(IBV_QPS_RTS, p.client.id->qp->state);
	got = &event->param.conn;
	CHECK(got->private_data_len == 6 && !memcmp(got->private_data, "answer", 6));
	CODE(0, got->retry_count);
	CODE(roce ? 3 : 0, got->rnr_retry_count);
	CODE(roce ? (int)p.server.id->qp->qp_num : 0, (int)got->qp_num);
	CODE(0, rdma_ack_cm_event(event));
	acknowledge_event(servers, RDMA_CM_EVENT_ESTABLISHED);
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
	acknowledge_event(clients, RDMA_CM_EVENT_DISCONNECTED);
	acknowledge_event(servers, RDMA_CM_EVENT_DISCONNECTED);
	destroy_pair(&p);
}

/* With the RoCE face, a request reports that its queue pair has a shared receive queue. */
static void test_srq_flag(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 4, 0, 1, 0, 0 } };
	struct rdma_conn_param param = DEFAULTS;
	struct rdma_cm_id *id = create_resolved_id(), *request;
	struct rdma_cm_event *event;
	struct ibv_cq *cq;

	NEED(cq = ibv_create_cq(id->verbs, 16, NULL, NULL, 0));
	NEED(attr.srq = ibv_create_srq(id->pd, &init));
	attr.send_cq = attr.recv_cq = cq;
	NEED(!rdma_create_qp(id, NULL, &attr));
	CODE(0, rdma_connect(id, &param));
	event = next_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	CODE(roce ? 1 : 0, event->param.conn.srq);
	CODE(0, rdma_reject(event->id, NULL, 0));
	request = event->id;
	CODE(0, rdma_ack_cm_event(event));
	CODE(0, rdma_destroy_id(request));
	acknowledge_event(clients, RDMA_CM_EVENT_REJECTED);
	rdma_destroy_qp(id);
	CODE(0, ibv_destroy_srq(attr.srq));
	CODE(0, ibv_destroy_cq(cq));
	CODE(0, rdma_destroy_id(id));
}

/* If no message arrives in RTR, there is no asynchronous event. */
static void test_no_async_event(void)
{
	struct ibv_async_event event;
	struct pair p;

	connect_both(&p, DEFAULTS, DEFAULTS);
	NEED(!fcntl(p.server.id->verbs->async_fd, F_SETFL, O_NONBLOCK));
	receive(&p.server, 1);
	post(&p.client, 2);
	expect_completion(&p.server, 1, IBV_WC_SUCCESS);
	CHECK(ibv_get_async_event(p.server.id->verbs, &event) == -1);
	destroy_pair(&p);
}

/* The peer disconnects or is destroyed. Data that has arrived is delivered first. Then a queue pair
 * with the RoCE face keeps its state until the program disconnects. With the iWARP face, it moves
 * to ERR. */
static void test_peer_ends(int destroys)
{
	struct pair p;

	connect_both(&p, DEFAULTS, DEFAULTS);
	receive(&p.server, 1);
	receive(&p.server, 2);
	post(&p.client, 3);
	expect_completion(&p.client, 3, IBV_WC_SUCCESS);
	if (destroys) {
		destroy_end(&p.client);
	} else {
		CODE(0, rdma_disconnect(p.client.id));
		acknowledge_event(clients, RDMA_CM_EVENT_DISCONNECTED);
	}
	acknowledge_event(servers, RDMA_CM_EVENT_DISCONNECTED);
	expect_completion(&p.server, 1, IBV_WC_SUCCESS);
	if (roce) {
		usleep(50000);
		CHECK(has_no_completion(&p.server));
		CODE(IBV_QPS_RTS, state(&p.server));
		post(&p.server, 4);
		post(&p.server, 5);
		expect_completion(&p.server, 4, IBV_WC_RETRY_EXC_ERR);
		expect_completion(&p.server, 5, IBV_WC_WR_FLUSH_ERR);
		expect_completion(&p.server, 2, IBV_WC_WR_FLUSH_ERR);
	} else {
		expect_completion(&p.server, 2, IBV_WC_WR_FLUSH_ERR);
	}
	CODE(IBV_QPS_ERR, state(&p.server));
	CHECK(has_no_completion(&p.server));
	CODE(0, rdma_disconnect(p.server.id));
	destroy_end(&p.server);
	if (!destroys)
		destroy_end(&p.client);
	acknowledge_pending_events(servers);
	acknowledge_pending_events(clients);
}

/* After the peer has disconnected, rdma_disconnect moves the queue pair to ERR. */
static void test_both_disconnect(void)
{
	struct pair p;

	connect_both(&p, DEFAULTS, DEFAULTS);
	receive(&p.server, 1);
	CODE(0, rdma_disconnect(p.client.id));
	acknowledge_event(clients, RDMA_CM_EVENT_DISCONNECTED);
	acknowledge_event(servers, RDMA_CM_EVENT_DISCONNECTED);
	if (roce)
		CHECK(has_no_completion(&p.server));
	CODE(0, rdma_disconnect(p.server.id));
	expect_completion(&p.server, 1, IBV_WC_WR_FLUSH_ERR);
	CODE(IBV_QPS_ERR, state(&p.server));
	CHECK(has_no_completion(&p.server));
	destroy_pair(&p);
}

/* With an rnr_retry count of 7, a Send waits for its receive without limit, even if its sender
 * disconnects. With other counts, the short limit of IWARP_RNR_TIMEOUT_MS applies. */
static void test_late_receive(int count, int sender_leaves)
{
	struct rdma_conn_param param = DEFAULTS;
	int waits = roce && count == 7;
	struct pair p;

	param.rnr_retry_count = count;
	connect_both(&p, param, param);
	post(&p.client, 1);
	if (sender_leaves) {
		expect_completion(&p.client, 1, IBV_WC_SUCCESS);
		CODE(0, rdma_disconnect(p.client.id));
		acknowledge_event(clients, RDMA_CM_EVENT_DISCONNECTED);
		acknowledge_event(servers, RDMA_CM_EVENT_DISCONNECTED);
	}
	usleep(500000);
	CODE(waits ? IBV_QPS_RTS : IBV_QPS_ERR, state(&p.server));
	receive(&p.server, 2);
	expect_completion(&p.server, 2, waits ? IBV_WC_SUCCESS : IBV_WC_WR_FLUSH_ERR);
	if (waits && !sender_leaves) {
		receive(&p.client, 3);
		post(&p.server, 4);
		expect_completion(&p.client, 1, IBV_WC_SUCCESS);
		expect_completion(&p.client, 3, IBV_WC_SUCCESS);
	}
	destroy_pair(&p);
}

/* If an attempt fails, each end gets an event with a status. */
static void test_rejections(void)
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

		request_connection(&p, DEFAULTS);
		event = next_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
		request = event->id;
		CODE(0, rdma_ack_cm_event(event));
		if (said)
			CODE(0, rdma_reject(request, reasons, said));
		CODE(0, rdma_destroy_id(request));
		event = next_event(clients, RDMA_CM_EVENT_REJECTED);
		CODE(roce ? 28 : -ECONNREFUSED, event->status);
		CODE(said, event->param.conn.private_data_len);
		CHECK(!said || !memcmp(event->param.conn.private_data, reasons, said));
		CODE(0, rdma_ack_cm_event(event));
		CODE(IBV_QPS_ERR, state(&p.client));
		destroy_end(&p.client);
	}
	/* Connect to the port of an identifier that does not listen. */
	NEED(!rdma_create_id(servers, &request, NULL, RDMA_PS_TCP));
	no_listener.sin_port = 0;
	NEED(!rdma_bind_addr(request, (struct sockaddr *)&no_listener));
	no_listener.sin_port = rdma_get_src_port(request);
	p.client = (struct end){ 0 };
	NEED(!rdma_create_id(clients, &p.client.id, NULL, RDMA_PS_TCP));
	NEED(!rdma_resolve_addr(p.client.id, NULL, (struct sockaddr *)&no_listener, TIMEOUT_MS));
	acknowledge_event(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
	NEED(!rdma_resolve_route(p.client.id, TIMEOUT_MS));
	acknowledge_event(clients, RDMA_CM_EVENT_ROUTE_RESOLVED);
	create_qp(&p.client);
	CODE(0, rdma_connect(p.client.id, NULL));
	event = next_event(clients, RDMA_CM_EVENT_REJECTED);
	CODE(roce ? 8 : -ECONNREFUSED, event->status);
	CODE(0, rdma_ack_cm_event(event));
	destroy_end(&p.client);
	CODE(0, rdma_destroy_id(request));
}

/* The initiator gives up before the program answers its request. With the RoCE face, the program
 * gets an event immediately. With the iWARP face, its call of rdma_accept fails. */
static void test_withdrawn_request(int has_qp)
{
	struct rdma_cm_event *event;
	struct pair p;

	request_connection(&p, DEFAULTS);
	event = next_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	p.server.id = event->id;
	CODE(0, rdma_ack_cm_event(event));
	if (has_qp) {
		create_qp(&p.server);
		receive(&p.server, 1);
	}
	destroy_end(&p.client);
	if (roce) {
		event = next_event(servers, RDMA_CM_EVENT_REJECTED);
		CHECK(event->id == p.server.id);
		CODE(4, event->status);
		CODE(0, rdma_ack_cm_event(event));
		if (has_qp)
			expect_completion(&p.server, 1, IBV_WC_WR_FLUSH_ERR);
	} else {
		CHECK(!event_within(servers, 50));
	}
	if (!has_qp)
		create_qp(&p.server);
	MINUS_ONE(roce ? EINVAL : ECONNRESET, rdma_accept(p.server.id, NULL));
	CHECK(!event_within(servers, 50));
	destroy_end(&p.server);
}

/* Destroying an identifier ends its connection, but not its queue pair. */
static void test_id_destroyed_first(void)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct ibv_qp *qp;
	struct pair p;

	connect_both(&p, DEFAULTS, DEFAULTS);
	receive(&p.client, 7);
	qp = p.client.id->qp;
	CODE(0, rdma_destroy_id(p.client.id));
	acknowledge_event(servers, RDMA_CM_EVENT_DISCONNECTED);
	expect_completion(&p.client, 7, IBV_WC_WR_FLUSH_ERR);
	CODE(0, ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
	CODE(IBV_QPS_ERR, attr.qp_state);
	CODE(0, ibv_destroy_qp(qp));
	CODE(0, ibv_dereg_mr(p.client.mr));
	CODE(0, ibv_destroy_cq(p.client.cq));
	destroy_end(&p.server);
}

/* If the queue pair fails before the reply arrives, the connection fails. */
static void test_failed_qp_cannot_connect(void)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct rdma_cm_event *event;
	struct pair p;

	request_connection(&p, DEFAULTS);
	event = next_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	p.server.id = event->id;
	CODE(0, rdma_ack_cm_event(event));
	create_qp(&p.server);
	CODE(0, ibv_modify_qp(p.client.id->qp, &attr, IBV_QP_STATE));
	CODE(0, rdma_accept(p.server.id, NULL));
	event = next_event(clients, RDMA_CM_EVENT_CONNECT_ERROR);
	CHECK(event->status < 0);
	CODE(0, rdma_ack_cm_event(event));
	CODE(IBV_QPS_ERR, state(&p.client));
	destroy_pair(&p);
}

static void test_backlog(void)
{
	enum { BACKLOG = 2, MANY = 5 };
	struct rdma_cm_id *listens, *requests[BACKLOG];
	struct sockaddr_in before = address;
	struct rdma_conn_param defaults = DEFAULTS;
	struct rdma_cm_event *event;
	struct pair p[MANY], again[BACKLOG];
	int i, rejected;

	NEED(!rdma_create_id(servers, &listens, NULL, RDMA_PS_TCP));
	address.sin_port = 0;
	NEED(!rdma_bind_addr(listens, (struct sockaddr *)&address));
	NEED(!rdma_listen(listens, BACKLOG));
	address.sin_port = rdma_get_src_port(listens);
	/* Resolve all identifiers first: later, events of resolving and of rejections would mix. */
	for (i = 0; i < MANY; i++)
		prepare(&p[i]);
	for (i = 0; i < MANY; i++)
		CODE(0, rdma_connect(p[i].client.id, &defaults));
	for (rejected = 0; rejected < MANY - BACKLOG; rejected++)
		acknowledge_event(clients, RDMA_CM_EVENT_REJECTED);
	for (i = 0; i < BACKLOG; i++) {
		event = next_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
		requests[i] = event->id;
		CODE(0, rdma_ack_cm_event(event));
	}
	CHECK(!event_within(servers, 0));
	/* Only requests whose event the program has not read count towards the backlog. */
	for (i = 0; i < BACKLOG; i++)
		request_connection(&again[i], DEFAULTS);
	for (i = 0; i < BACKLOG; i++) {
		event = next_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
		again[i].server.id = event->id;
		CODE(0, rdma_ack_cm_event(event));
	}
	for (i = 0; i < BACKLOG; i++) {
		CODE(0, rdma_destroy_id(requests[i]));
		destroy_pair(&again[i]);
	}
	for (i = 0; i < MANY; i++)
		destroy_end(&p[i].client);
	CODE(0, rdma_destroy_id(listens));
	acknowledge_pending_events(servers);
	acknowledge_pending_events(clients);
	address = before;
}

/* An identifier has a port as soon as it has an address, and a bound listener has a device. */
static void test_ports_and_devices(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET };
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	struct pair p;
	uint16_t port;

	CHECK(listener->verbs && listener->pd && listener->port_num == 1);
	NEED(!rdma_create_id(clients, &id, NULL, RDMA_PS_TCP));
	CODE(0, rdma_get_src_port(id));
	CODE(0, rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, TIMEOUT_MS));
	CHECK(rdma_get_src_port(id) != 0);
	acknowledge_event(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
	CODE(0, rdma_destroy_id(id));

	NEED(!rdma_create_id(servers, &id, NULL, RDMA_PS_TCP));
	CODE(0, rdma_bind_addr(id, (struct sockaddr *)&any));
	CHECK(rdma_get_src_port(id) != 0 && !id->verbs);
	CODE(0, rdma_listen(id, 1));
	CHECK(!id->verbs);
	CODE(0, rdma_destroy_id(id));

	request_connection(&p, DEFAULTS);
	port = rdma_get_src_port(p.client.id);
	event = next_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	p.server.id = event->id;
	CODE(port, rdma_get_dst_port(p.server.id));
	CODE(0, rdma_ack_cm_event(event));
	destroy_pair(&p);
}

static void test_wrong_state(void)
{
	struct rdma_cm_id *id;
	struct pair p;

	MINUS_ONE(EINVAL, rdma_get_cm_event(clients, NULL));
	MINUS_ONE(EINVAL, rdma_get_cm_event(NULL, NULL));
	NEED(!rdma_create_id(clients, &id, NULL, RDMA_PS_TCP));
	MINUS_ONE(EINVAL, rdma_notify(id, IBV_EVENT_COMM_EST));
	MINUS_ONE(EINVAL, rdma_establish(id));
	CODE(0, rdma_destroy_id(id));
	id = create_resolved_id();
	MINUS_ONE(EINVAL, rdma_notify(id, IBV_EVENT_COMM_EST));
	MINUS_ONE(EINVAL, rdma_establish(id));
	CODE(0, rdma_destroy_id(id));
	connect_both(&p, DEFAULTS, DEFAULTS);
	MINUS_ONE(EINVAL, rdma_notify(p.server.id, IBV_EVENT_QP_FATAL));
	if (roce)
		MINUS_ONE(EISCONN, rdma_notify(p.server.id, IBV_EVENT_COMM_EST));
	else
		CODE(0, rdma_notify(p.server.id, IBV_EVENT_COMM_EST));
	MINUS_ONE(EINVAL, rdma_establish(p.server.id));
	destroy_pair(&p);
}

/* An attempt that fails because it has no queue pair does not affect the next attempt. */
static void test_refused_attempt(void)
{
	struct rdma_conn_param early = DEFAULTS, defaults = DEFAULTS;
	struct rdma_cm_event *event;
	struct pair p = { 0 };

	early.qp_num = 0xfffffe;
	NEED(!rdma_create_id(clients, &p.client.id, NULL, RDMA_PS_TCP));
	NEED(!rdma_resolve_addr(p.client.id, NULL, (struct sockaddr *)&address, TIMEOUT_MS));
	acknowledge_event(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
	MINUS_ONE(EINVAL, rdma_connect(p.client.id, &early));
	NEED(!rdma_resolve_route(p.client.id, TIMEOUT_MS));
	acknowledge_event(clients, RDMA_CM_EVENT_ROUTE_RESOLVED);
	create_qp(&p.client);
	CODE(0, rdma_connect(p.client.id, &defaults));
	event = next_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	p.server.id = event->id;
	CODE(0, rdma_ack_cm_event(event));
	create_qp(&p.server);
	CODE(0, rdma_accept(p.server.id, &defaults));
	acknowledge_event(clients, RDMA_CM_EVENT_ESTABLISHED);
	destroy_pair(&p);
}

static struct rdma_cm_event *unacknowledged;

static void *acknowledge_later(void *arg)
{
	(void)arg;
	usleep(200000);
	/* Write to the event before the call, which may end with the identifier destroyed. */
	__atomic_store_n(&unacknowledged->status, 77, __ATOMIC_SEQ_CST);
	CODE(0, rdma_ack_cm_event(unacknowledged));
	return NULL;
}

static void test_destroy_waits(void)
{
	static volatile int done;
	struct rdma_cm_id *id;
	pthread_t thread;

	NEED(!rdma_create_id(clients, &id, NULL, RDMA_PS_TCP));
	NEED(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, TIMEOUT_MS));
	unacknowledged = next_event(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
	NEED(!pthread_create(&thread, NULL, acknowledge_later, NULL));
	CODE(0, rdma_destroy_id(id));
	done = 1;
	NEED(!pthread_join(thread, NULL));
	CHECK(done);
}

/* Options: the states in which they are accepted, and the ACK timeout that queue pairs report. */

enum id_state { IDLE, BOUND, LISTENS, RESOLVED, WITH_QP, CONNECTED, ACCEPTED, REQUESTED, STATES };

static struct rdma_cm_id *id_in_state(enum id_state state, struct pair *p)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr = address.sin_addr };
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	*p = (struct pair){ 0 };
	switch (state) {
	case RESOLVED:
		return p->client.id = create_resolved_id();
	case WITH_QP:
		p->client.id = create_resolved_id();
		create_qp(&p->client);
		return p->client.id;
	case CONNECTED:
	case ACCEPTED:
		connect_both(p, DEFAULTS, DEFAULTS);
		return state == CONNECTED ? p->client.id : p->server.id;
	case REQUESTED:
		request_connection(p, DEFAULTS);
		event = next_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
		p->server.id = event->id;
		CODE(0, rdma_ack_cm_event(event));
		return p->server.id;
	default:
		break;
	}
	NEED(!rdma_create_id(clients, &id, NULL, RDMA_PS_TCP));
	if (state != IDLE)
		NEED(!rdma_bind_addr(id, (struct sockaddr *)&any));
	if (state == LISTENS)
		NEED(!rdma_listen(id, 1));
	return p->client.id = id;
}

static void destroy_ends(struct pair *p)
{
	if (p->client.id)
		destroy_end(&p->client);
	if (p->server.id)
		destroy_end(&p->server);
	acknowledge_pending_events(servers);
	acknowledge_pending_events(clients);
}

static void test_options(void)
{
	static const struct {
		int name;
		size_t len;
		int value;
		/* The states in which the option is accepted: one bit for each state. */
		unsigned accepted;
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
	enum id_state state;
	struct pair p;
	unsigned i;

	for (state = IDLE; state < STATES; state++) {
		struct rdma_cm_id *id = id_in_state(state, &p);

		for (i = 0; i < sizeof(all) / sizeof(*all); i++) {
			int value = all[i].value;

			/* On little-endian machines, the first byte contains the value. */
			if (all[i].accepted & 1u << state)
				CODE(0, rdma_set_option(id, RDMA_OPTION_ID, all[i].name, &value, all[i].len));
			else
				MINUS_ONE(EINVAL, rdma_set_option(id, RDMA_OPTION_ID, all[i].name, &value, all[i].len));
		}
		MINUS_ONE(ENOSYS, rdma_set_option(id, RDMA_OPTION_ID, 99, &i, 4));
		MINUS_ONE(ENOSYS, rdma_set_option(id, 99, RDMA_OPTION_ID_TOS, &i, 1));
		MINUS_ONE(EINVAL, rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, NULL, 1));
		destroy_ends(&p);
	}
}

/* The ACK timeout may be set before and after the queue pair is created, and more than once. The
 * timeout of a listener does not apply to its connections. */
static void test_ack_timeout(void)
{
	uint8_t first = 10, second = 5, other = 20;
	struct rdma_cm_event *event;
	struct pair p;
	int before;

	CODE(0, rdma_set_option(listener, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &other, 1));
	for (before = 0; before < 2; before++) {
		p = (struct pair){ 0 };
		p.client.id = create_resolved_id();
		if (before)
			CODE(0, rdma_set_option(p.client.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &first, 1));
		create_qp(&p.client);
		if (!before)
			CODE(0, rdma_set_option(p.client.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &first, 1));
		CODE(0, rdma_connect(p.client.id, NULL));
		event = next_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
		p.server.id = event->id;
		CODE(0, rdma_ack_cm_event(event));
		create_qp(&p.server);
		CODE(0, rdma_accept(p.server.id, NULL));
		acknowledge_event(clients, RDMA_CM_EVENT_ESTABLISHED);
		acknowledge_event(servers, RDMA_CM_EVENT_ESTABLISHED);
		CODE(first, query(&p.client).timeout);
		CODE(roce ? 14 : 0, query(&p.server).timeout);
		CODE(0, rdma_set_option(p.server.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &second, 1));
		CODE(second, query(&p.server).timeout);
		CODE(first, query(&p.client).timeout);
		destroy_pair(&p);
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

	test_depths();
	test_parameters();
	test_srq_flag();
	test_no_async_event();
	test_peer_ends(0);
	test_peer_ends(1);
	test_both_disconnect();
	test_late_receive(7, 0);
	test_late_receive(6, 0);
	if (roce)
		test_late_receive(7, 1);
	test_rejections();
	test_withdrawn_request(0);
	test_withdrawn_request(1);
	test_id_destroyed_first();
	test_failed_qp_cannot_connect();
	test_backlog();
	test_ports_and_devices();
	test_wrong_state();
	test_refused_attempt();
	test_destroy_waits();
	test_options();
	test_ack_timeout();

	CODE(0, rdma_destroy_id(listener));
	rdma_destroy_event_channel(servers);
	rdma_destroy_event_channel(clients);
	return result();
}
