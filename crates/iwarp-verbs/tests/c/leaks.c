/* Tests that no way of destroying objects of the verbs or the connection manager leaks resources.
 * The first argument is the face of the device, "rnic" or "roce". The second, optional
 * argument is the name of the only scenario to run. */
#define _GNU_SOURCE
#include "usage.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <sys/wait.h>

#include "by_number.h"

/* Usage is counted per process, so each scenario has a process of its own. They run one after the
 * other: on a busy machine, a refusal may become a reset. */
enum { SIZE = 4096, TIMEOUT_MS = 20000, ROUNDS = 10, DEEP = 8, PROCESSES = 1 };

static int roce;
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct rdma_event_channel *servers, *clients;
static struct rdma_cm_id *listener;
static struct sockaddr_in address, no_listener;
static char memory[SIZE];

/* ---- objects of the verbs ---- */

static void test_device(int arg)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *own;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_pd *domain, *parent;
	struct ibv_td *td;

	(void)arg;
	NEED(list && (own = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	NEED((domain = ibv_alloc_pd(own)) && (td = ibv_alloc_td(own, &(struct ibv_td_init_attr){ 0 })));
	NEED(parent = ibv_alloc_parent_domain(own, &(struct ibv_parent_domain_init_attr){ .pd = domain,
		.td = td }));
	NEED((channel = ibv_create_comp_channel(own)) && (cq = ibv_create_cq(own, 16, NULL, channel, 0)));
	NEED(!ibv_req_notify_cq(cq, 0) && !ibv_resize_cq(cq, 4000));
	CODE(0, ibv_destroy_cq(cq));
	CODE(0, ibv_destroy_comp_channel(channel));
	CODE(0, ibv_dealloc_pd(parent));
	CODE(0, ibv_dealloc_td(td));
	CODE(0, ibv_dealloc_pd(domain));
	CODE(0, ibv_close_device(own));
}

static struct ibv_qp *create_qp(enum ibv_qp_type type, struct ibv_cq *cq, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = type,
		.cap = { DEEP, DEEP, 1, 1, 64 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);

	NEED(qp);
	return qp;
}

static void fill_queues(struct ibv_qp *qp, struct ibv_srq *srq, struct ibv_mr *mr, int sends)
{
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr send = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED }, *bad;

	for (int i = 0; i < DEEP; i++)
		NEED((srq ? ibv_post_srq_recv(srq, &recv, &bad_recv) : ibv_post_recv(qp, &recv, &bad_recv)) == 0);
	for (int i = 0; sends && i < DEEP; i++)
		NEED(ibv_post_send(qp, &send, &bad) == 0);
}

/* Connects two queue pairs by queue pair number and posts requests. Destroys the first one in the
 * given state, then the second one. */
static void test_state(int state)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	struct ibv_qp *qp, *peer;

	NEED(mr && cq);
	qp = create_qp(IBV_QPT_RC, cq, NULL);
	peer = create_qp(IBV_QPT_RC, cq, NULL);
	if (state >= IBV_QPS_INIT)
		CODE(0, move_to(qp, IBV_QPS_INIT, 0, TO_INIT));
	if (state >= IBV_QPS_RTR) {
		CODE(0, move_to(peer, IBV_QPS_INIT, 0, TO_INIT));
		CODE(0, move_to(peer, IBV_QPS_RTR, qp->qp_num, TO_RTR));
		CODE(0, move_to(qp, IBV_QPS_RTR, peer->qp_num, TO_RTR));
		CODE(0, move_to(peer, IBV_QPS_RTS, 0, TO_RTS));
		fill_queues(peer, NULL, mr, 1);
	}
	if (state >= IBV_QPS_RTS)
		CODE(0, move_to(qp, IBV_QPS_RTS, 0, TO_RTS));
	if (state >= IBV_QPS_INIT)
		fill_queues(qp, NULL, mr, state >= IBV_QPS_RTS);
	if (state > IBV_QPS_RTS)
		CODE(0, move_to(qp, state, 0, IBV_QP_STATE));
	CODE(0, ibv_destroy_qp(qp));
	CODE(0, ibv_destroy_qp(peer));
	CODE(0, ibv_destroy_cq(cq));
	CODE(0, ibv_dereg_mr(mr));
}

/* A shared receive queue with posted receives, and a queue pair that uses it. */
static void test_shared_queue(int tags)
{
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_srq_init_attr_ex attr = { .attr = { .max_wr = DEEP, .max_sge = 1 }, .srq_type = tags
		? IBV_SRQT_TM : IBV_SRQT_BASIC, .pd = pd,
		.cq = cq, .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
			(tags ? IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM : 0),
		.tm_cap = { .max_num_tags = DEEP, .max_ops = DEEP } };
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr ? mr->lkey : 0 };
	struct ibv_ops_wr add = { .opcode = IBV_WR_TAG_ADD,
		.tm = { .add = { .sg_list = &sge, .num_sge = 1, .mask = ~0ull } } }, *bad;
	struct ibv_srq *srq;
	struct ibv_qp *qp;

	NEED(cq && mr && (srq = ibv_create_srq_ex(context, &attr)));
	qp = create_qp(IBV_QPT_RC, cq, srq);
	fill_queues(qp, srq, mr, 0);
	for (int i = 0; tags && i < 3; i++)
		CODE(0, ibv_post_srq_ops(srq, &add, &bad));
	CODE(0, ibv_destroy_qp(qp));
	CODE(0, ibv_destroy_srq(srq));
	CODE(0, ibv_destroy_cq(cq));
	CODE(0, ibv_dereg_mr(mr));
}

/* Deallocates a memory window while it is bound, and registers regions with several kinds of
 * access. */
static void test_memory(int type)
{
	static const int KINDS[] = { 0, IBV_ACCESS_ON_DEMAND, IBV_ACCESS_ZERO_BASED,
		IBV_ACCESS_RELAXED_ORDERING };
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND),
		*other;
	struct ibv_mw *mw = ibv_alloc_mw(pd, type);
	struct ibv_qp *a, *b;

	NEED(cq && mr && mw);
	a = create_qp(IBV_QPT_RC, cq, NULL);
	b = create_qp(IBV_QPT_RC, cq, NULL);
	connect_both(a, b);
	if (type == IBV_MW_TYPE_1) {
		struct ibv_mw_bind bind = { .send_flags = IBV_SEND_SIGNALED,
			.bind_info = { mr, (uintptr_t)memory, 64, IBV_ACCESS_REMOTE_WRITE } };

		NEED(ibv_bind_mw(a, mw, &bind) == 0);
	} else {
		struct ibv_send_wr wr = { .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED,
			.bind_mw = { mw, mw->rkey, { mr, (uintptr_t)memory, 64, IBV_ACCESS_REMOTE_WRITE } } }, *bad;

		NEED(ibv_post_send(a, &wr, &bad) == 0);
	}
	expect_completions(cq, 1, IBV_WC_SUCCESS);
	CODE(EBUSY, ibv_dereg_mr(mr));
	CODE(0, ibv_dealloc_mw(mw));
	for (unsigned i = 0; i < sizeof(KINDS) / sizeof(*KINDS); i++) {
		NEED(other = ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE | KINDS[i]));
		CODE(0, ibv_rereg_mr(other, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, memory, SIZE / 2, 0));
		CODE(0, ibv_dereg_mr(other));
	}
	NEED(other = ibv_alloc_null_mr(pd));
	CODE(0, ibv_dereg_mr(other));
	CODE(0, ibv_destroy_qp(a));
	CODE(0, ibv_destroy_qp(b));
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_destroy_cq(cq));
}

/* A datagram queue pair with an address handle and a multicast group, and an XRC domain with its
 * queues. */
static void test_datagrams_and_xrc(int arg)
{
	struct ibv_ah_attr to = { .port_num = 1, .is_global = 1, .grh = { .hop_limit = 1 } };
	union ibv_gid group =
		{ .raw = { [10] = 0xff, [11] = 0xff, [12] = 239, [13] = 255, [14] = 77, [15] = 31 } };
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	struct ibv_xrcd *xrcd = ibv_open_xrcd(context,
		&(struct ibv_xrcd_init_attr){ .comp_mask = 3, .fd = -1, .oflags = O_CREAT });
	struct ibv_qp_init_attr_ex target = { .qp_type = IBV_QPT_XRC_RECV,
		.comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd };
	struct ibv_srq_init_attr_ex attr = { .attr = { .max_wr = DEEP, .max_sge = 1 },
		.srq_type = IBV_SRQT_XRC, .pd = pd, .cq = cq, .xrcd = xrcd,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ |
			IBV_SRQ_INIT_ATTR_XRCD };
	struct ibv_qp *datagrams, *receiver;
	struct ibv_srq *srq;
	struct ibv_ah *ah;

	(void)arg;
	NEED(cq && xrcd && ibv_query_gid(context, 1, 0, &to.grh.dgid) == 0);
	NEED((ah = ibv_create_ah(pd, &to)) && (srq = ibv_create_srq_ex(context, &attr)));
	NEED(receiver = ibv_create_qp_ex(context, &target));
	datagrams = create_qp(IBV_QPT_UD, cq, NULL);
	CODE(0, ibv_attach_mcast(datagrams, &group, 0));
	CODE(EBUSY, ibv_destroy_qp(datagrams));
	CODE(0, ibv_detach_mcast(datagrams, &group, 0));
	CODE(0, ibv_destroy_qp(datagrams));
	CODE(0, ibv_destroy_ah(ah));
	CODE(0, ibv_destroy_qp(receiver));
	CODE(0, ibv_destroy_srq(srq));
	CODE(0, ibv_close_xrcd(xrcd));
	CODE(0, ibv_destroy_cq(cq));
}

/* ---- identifiers of the connection manager ---- */

static struct rdma_cm_event *event_within(struct rdma_event_channel *channel, int ms)
{
	struct pollfd fd = { .fd = channel->fd, .events = POLLIN };
	struct rdma_cm_event *event;

	if (poll(&fd, 1, ms) != 1)
		return NULL;
	NEED(rdma_get_cm_event(channel, &event) == 0);
	return event;
}

/* Waits for the next event, which must be of this kind, and returns its identifier. */
static struct rdma_cm_id *expect_event(struct rdma_event_channel *channel,
	enum rdma_cm_event_type kind)
{
	struct rdma_cm_event *event = event_within(channel, TIMEOUT_MS);
	struct rdma_cm_id *id;

	NEED(event);
	if (event->event != kind) {
		fprintf(stderr, "%s instead of %s\n", rdma_event_str(event->event), rdma_event_str(kind));
		exit(2);
	}
	id = event->id;
	CODE(0, rdma_ack_cm_event(event));
	return id;
}

static void drain_events(struct rdma_event_channel *channel)
{
	struct rdma_cm_event *event;

	while ((event = event_within(channel, 0)))
		CODE(0, rdma_ack_cm_event(event));
}

static struct rdma_cm_id *create_id(struct rdma_event_channel *channel)
{
	struct rdma_cm_id *id;

	NEED(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	return id;
}

static void create_id_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { DEEP, DEEP, 1, 1, 64 } };
	struct ibv_recv_wr wr = { 0 }, *bad;

	NEED(rdma_create_qp(id, NULL, &attr) == 0);
	for (int i = 0; i < DEEP; i++)
		NEED(ibv_post_recv(id->qp, &wr, &bad) == 0);
}

/* The last step of an identifier before the test destroys it. */
enum step { CREATED, BOUND, LISTENS, RESOLVING, RESOLVED, ROUTED, WITH_QP, STEPS };

static struct rdma_cm_id *id_after_step(enum step step, struct sockaddr_in *to)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr = to->sin_addr };
	struct rdma_cm_id *id = create_id(clients);

	if (step == BOUND || step == LISTENS)
		NEED(rdma_bind_addr(id, (struct sockaddr *)&any) == 0);
	if (step == LISTENS)
		NEED(rdma_listen(id, 3) == 0);
	if (step >= RESOLVING)
		NEED(rdma_resolve_addr(id, NULL, (struct sockaddr *)to, TIMEOUT_MS) == 0);
	if (step >= RESOLVED)
		expect_event(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
	if (step >= ROUTED) {
		NEED(rdma_resolve_route(id, TIMEOUT_MS) == 0);
		expect_event(clients, RDMA_CM_EVENT_ROUTE_RESOLVED);
	}
	if (step >= WITH_QP)
		create_id_qp(id);
	return id;
}

static void destroy_with_qp(struct rdma_cm_id *id)
{
	if (id->qp)
		rdma_destroy_qp(id);
	CODE(0, rdma_destroy_id(id));
}

static void test_destroyed_after_step(int step)
{
	destroy_with_qp(id_after_step(step, &address));
}

/* No device has this address. */
static void test_unknown_address(int arg)
{
	struct sockaddr_in6 to = { .sin6_family = AF_INET6, .sin6_port = htons(9),
		.sin6_addr = { { { 0x20, 1, 0xd, 0xb8, [15] = 1 } } } };
	struct sockaddr_in from = address;
	struct rdma_cm_id *id = create_id(clients);

	(void)arg;
	from.sin_port = 0;
	if (rdma_resolve_addr(id, (struct sockaddr *)&from, (struct sockaddr *)&to, TIMEOUT_MS) == 0)
		expect_event(clients, RDMA_CM_EVENT_ADDR_ERROR);
	CODE(0, rdma_destroy_id(id));
}

static struct rdma_cm_id *send_connect_request(struct sockaddr_in *to)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1, .retry_count = 7,
		.rnr_retry_count = 7 };
	struct rdma_cm_id *id = id_after_step(WITH_QP, to);

	CODE(0, rdma_connect(id, &param));
	return id;
}

static void test_refused(int arg)
{
	struct rdma_cm_id *id = send_connect_request(&no_listener);

	(void)arg;
	expect_event(clients, RDMA_CM_EVENT_REJECTED);
	destroy_with_qp(id);
}

enum answer { REJECTS, DROPS, DROPS_WITH_QP, WITHDRAWN, ANSWERS };

static void test_not_accepted(int variant)
{
	struct rdma_cm_id *client = send_connect_request(&address), *server;

	server = expect_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	if (variant == DROPS_WITH_QP || variant == WITHDRAWN)
		create_id_qp(server);
	if (variant == WITHDRAWN)
		destroy_with_qp(client);
	if (variant == REJECTS)
		CODE(0, rdma_reject(server, "no", 2));
	destroy_with_qp(server);
	if (variant != WITHDRAWN) {
		expect_event(clients, RDMA_CM_EVENT_REJECTED);
		destroy_with_qp(client);
	}
	drain_events(servers);
}

static struct rdma_cm_id *accept_request(void)
{
	struct rdma_cm_id *server = expect_event(servers, RDMA_CM_EVENT_CONNECT_REQUEST);

	create_id_qp(server);
	CODE(0, rdma_accept(server, NULL));
	expect_event(clients, RDMA_CM_EVENT_ESTABLISHED);
	expect_event(servers, RDMA_CM_EVENT_ESTABLISHED);
	return server;
}

/* The first step of ending a connection. The other steps follow in the usual order. */
enum end { CLIENT_LEAVES, SERVER_LEAVES, BOTH_LEAVE, CLIENT_DESTROYED, SERVER_DESTROYED, QP_FAILS,
	QP_FIRST, ID_FIRST, ENDS };

/* Destroys an identifier before its queue pair, and before the completion queues and channels that
 * rdma_create_qp created for it. */
static void destroy_id_before_qp(struct rdma_cm_id *id)
{
	struct rdma_cm_id copy = *id;

	CODE(0, rdma_destroy_id(id));
	CODE(0, ibv_destroy_qp(copy.qp));
	CODE(0, ibv_destroy_cq(copy.send_cq));
	CODE(0, ibv_destroy_cq(copy.recv_cq));
	CODE(0, ibv_destroy_comp_channel(copy.send_cq_channel));
	CODE(0, ibv_destroy_comp_channel(copy.recv_cq_channel));
}

static void test_connection(int variant)
{
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	struct rdma_cm_id *client = send_connect_request(&address), *server = accept_request();
	struct ibv_qp *qp = client->qp;

	if (variant == CLIENT_LEAVES || variant == BOTH_LEAVE)
		CODE(0, rdma_disconnect(client));
	if (variant == SERVER_LEAVES || variant == BOTH_LEAVE)
		CODE(0, rdma_disconnect(server));
	if (variant == QP_FAILS)
		CODE(0, ibv_modify_qp(qp, &error, IBV_QP_STATE));
	if (variant == QP_FIRST)
		rdma_destroy_qp(client);
	if (variant == CLIENT_DESTROYED)
		destroy_with_qp(client);
	if (variant == SERVER_DESTROYED)
		destroy_with_qp(server);
	if (variant == ID_FIRST)
		destroy_id_before_qp(client);
	if (variant != SERVER_DESTROYED && variant != QP_FIRST) {
		expect_event(servers, RDMA_CM_EVENT_DISCONNECTED);
		destroy_with_qp(server);
	} else if (variant == QP_FIRST) {
		destroy_with_qp(server);
	}
	if (variant != CLIENT_DESTROYED && variant != ID_FIRST)
		destroy_with_qp(client);
	drain_events(servers);
	drain_events(clients);
}

enum requests { UNREAD, READ, CANCELLED, REQUESTS };

/* Destroys a listener with connection requests, then its channel. The requests are unread events,
 * or the application has read one of them, or the clients have withdrawn them. */
static void test_listener(int variant)
{
	struct rdma_event_channel *own = rdma_create_event_channel();
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr = address.sin_addr };
	struct rdma_cm_id *new_listener, *requesters[2], *request = NULL;

	NEED(own);
	new_listener = create_id(own);
	NEED(rdma_bind_addr(new_listener, (struct sockaddr *)&to) == 0 &&
		rdma_listen(new_listener, 4) == 0);
	to.sin_port = rdma_get_src_port(new_listener);
	for (int i = 0; i < 2; i++)
		requesters[i] = send_connect_request(&to);
	for (int i = 0; variant == CANCELLED && i < 2; i++)
		destroy_with_qp(requesters[i]);
	if (variant == READ)
		request = expect_event(own, RDMA_CM_EVENT_CONNECT_REQUEST);
	if (variant == UNREAD)
		NEED(poll(&(struct pollfd){ .fd = own->fd, .events = POLLIN }, 1, TIMEOUT_MS) == 1);
	CODE(0, rdma_destroy_id(new_listener));
	if (request)
		destroy_with_qp(request);
	rdma_destroy_event_channel(own);
	for (int i = 0; variant != CANCELLED && i < 2; i++)
		destroy_with_qp(requesters[i]);
	drain_events(clients);
}

/* Moves an identifier to another channel and destroys the old channel. */
static void test_channel(int arg)
{
	struct rdma_event_channel *old = rdma_create_event_channel(), *now = rdma_create_event_channel();
	struct rdma_cm_id *id;

	(void)arg;
	NEED(old && now);
	id = create_id(old);
	NEED(rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, TIMEOUT_MS) == 0);
	NEED(rdma_migrate_id(id, now) == 0);
	rdma_destroy_event_channel(old);
	NEED(poll(&(struct pollfd){ .fd = now->fd, .events = POLLIN }, 1, TIMEOUT_MS) == 1);
	CODE(0, rdma_destroy_id(id));
	rdma_destroy_event_channel(now);
}

/* A datagram identifier that joins a multicast group. It leaves the group if `leaves` is set. */
static void test_group(int leaves)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_UD, .cap = { DEEP, DEEP, 1, 1, 0 } };
	struct sockaddr_in group = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(0xefff4d51) },
		from = address;
	struct rdma_cm_id *id;

	from.sin_port = 0;
	NEED(rdma_create_id(clients, &id, NULL, RDMA_PS_UDP) == 0);
	NEED(rdma_resolve_addr(id, (struct sockaddr *)&from, (struct sockaddr *)&group, TIMEOUT_MS) == 0);
	expect_event(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
	NEED(rdma_create_qp(id, NULL, &attr) == 0);
	CODE(0, rdma_join_multicast(id, (struct sockaddr *)&group, NULL));
	expect_event(clients, RDMA_CM_EVENT_MULTICAST_JOIN);
	if (leaves)
		CODE(0, rdma_leave_multicast(id, (struct sockaddr *)&group));
	else
		CODE(EBUSY, ibv_destroy_qp(id->qp));
	destroy_with_qp(id);
}

static const struct {
	const char *name;
	void (*run)(int);
	int from, to;
} scenarios[] = {
	{ "device", test_device, 0, 1 },
	{ "queue pair in a state", test_state, IBV_QPS_RESET, IBV_QPS_SQE },
	{ "failed queue pair", test_state, IBV_QPS_ERR, IBV_QPS_ERR + 1 },
	{ "shared receive queue", test_shared_queue, 0, 2 },
	{ "memory", test_memory, IBV_MW_TYPE_1, IBV_MW_TYPE_2 + 1 },
	{ "datagrams and domains", test_datagrams_and_xrc, 0, 1 },
	{ "identifier after a step", test_destroyed_after_step, CREATED, STEPS },
	{ "unknown address", test_unknown_address, 0, 1 },
	{ "refused", test_refused, 0, 1 },
	{ "not accepted", test_not_accepted, REJECTS, ANSWERS },
	{ "connection", test_connection, CLIENT_LEAVES, ENDS },
	{ "listener", test_listener, UNREAD, REQUESTS },
	{ "channel", test_channel, 0, 1 },
	{ "group", test_group, 0, 2 },
};

static void set_up(void)
{
	struct rdma_cm_id *closed;

	address = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	no_listener = address;
	context = open_first();
	NEED(pd = ibv_alloc_pd(context));
	NEED((servers = rdma_create_event_channel()) && (clients = rdma_create_event_channel()));
	listener = create_id(servers);
	NEED(rdma_bind_addr(listener, (struct sockaddr *)&address) == 0 && rdma_listen(listener, 8) == 0);
	address.sin_port = rdma_get_src_port(listener);
	/* This identifier is bound to a port but does not listen. */
	closed = create_id(servers);
	NEED(rdma_bind_addr(closed, (struct sockaddr *)&no_listener) == 0);
	no_listener.sin_port = rdma_get_src_port(closed);
}

/* Waits for a process that ran a scenario. */
static void wait_for_one(void)
{
	int status;

	NEED(wait(&status) > 0);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int argc, char **argv)
{
	int running = 0;

	roce = argc > 1 && !strcmp(argv[1], "roce");
	for (unsigned i = 0; i < sizeof(scenarios) / sizeof(*scenarios); i++)
		for (int arg = scenarios[i].from; arg < scenarios[i].to; arg++) {
			pid_t child;

			if (argc > 2 && strcmp(argv[2], scenarios[i].name))
				continue;
			if (running == PROCESSES)
				wait_for_one();
			else
				running++;
			child = fork();
			NEED(child >= 0);
			if (child == 0) {
				set_up();
				/* Let the tables of the library grow first. */
				for (int round = 0; round < ROUNDS; round++)
					test_memory(IBV_MW_TYPE_1 + round % 2);
				check_no_leaks(scenarios[i].name, scenarios[i].run, arg, ROUNDS);
				exit(failures != 0);
			}
		}
	while (running--)
		wait_for_one();
	return result();
}
