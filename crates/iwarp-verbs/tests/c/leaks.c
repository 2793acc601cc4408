/* No way to end objects of the verbs and the connection manager leaks anything. The argument is the
 * face of the device. */
#define _GNU_SOURCE
#include "usage.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>

#include "by_number.h"

enum { SIZE = 4096, LONG = 20000, ROUNDS = 10, DEEP = 8 };

static int roce;
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct rdma_event_channel *servers, *clients;
static struct rdma_cm_id *listener;
static struct sockaddr_in address, no_listener;
static char memory[SIZE];

/* ---- objects of the verbs ---- */

static void a_device(int arg)
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

static struct ibv_qp *make_qp(enum ibv_qp_type type, struct ibv_cq *cq, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = type,
		.cap = { DEEP, DEEP, 1, 1, 64 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);

	NEED(qp);
	return qp;
}

static void post_all(struct ibv_qp *qp, struct ibv_srq *srq, struct ibv_mr *mr, int sends)
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

/* Connects two queue pairs by number and posts requests. One of them is destroyed in the given
 * state, and the other one later. */
static void a_state(int state)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	struct ibv_qp *qp, *peer;

	NEED(mr && cq);
	qp = make_qp(IBV_QPT_RC, cq, NULL);
	peer = make_qp(IBV_QPT_RC, cq, NULL);
	if (state >= IBV_QPS_INIT)
		CODE(0, move_to(qp, IBV_QPS_INIT, 0, TO_INIT));
	if (state >= IBV_QPS_RTR) {
		CODE(0, move_to(peer, IBV_QPS_INIT, 0, TO_INIT));
		CODE(0, move_to(peer, IBV_QPS_RTR, qp->qp_num, TO_RTR));
		CODE(0, move_to(qp, IBV_QPS_RTR, peer->qp_num, TO_RTR));
		CODE(0, move_to(peer, IBV_QPS_RTS, 0, TO_RTS));
		post_all(peer, NULL, mr, 1);
	}
	if (state >= IBV_QPS_RTS)
		CODE(0, move_to(qp, IBV_QPS_RTS, 0, TO_RTS));
	if (state >= IBV_QPS_INIT)
		post_all(qp, NULL, mr, state >= IBV_QPS_RTS);
	if (state > IBV_QPS_RTS)
		CODE(0, move_to(qp, state, 0, IBV_QP_STATE));
	CODE(0, ibv_destroy_qp(qp));
	CODE(0, ibv_destroy_qp(peer));
	CODE(0, ibv_destroy_cq(cq));
	CODE(0, ibv_dereg_mr(mr));
}

/* A shared receive queue with receives, and a queue pair that ends together with it. */
static void a_shared_queue(int tags)
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
	qp = make_qp(IBV_QPT_RC, cq, srq);
	post_all(qp, srq, mr, 0);
	for (int i = 0; tags && i < 3; i++)
		CODE(0, ibv_post_srq_ops(srq, &add, &bad));
	CODE(0, ibv_destroy_qp(qp));
	CODE(0, ibv_destroy_srq(srq));
	CODE(0, ibv_destroy_cq(cq));
	CODE(0, ibv_dereg_mr(mr));
}

/* A window that is destroyed while bound, and regions of several kinds. */
static void each_kind_of_memory(int type)
{
	static const int KINDS[] = { 0, IBV_ACCESS_ON_DEMAND, IBV_ACCESS_ZERO_BASED,
		IBV_ACCESS_RELAXED_ORDERING };
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND),
		*other;
	struct ibv_mw *mw = ibv_alloc_mw(pd, type);
	struct ibv_qp *a, *b;

	NEED(cq && mr && mw);
	a = make_qp(IBV_QPT_RC, cq, NULL);
	b = make_qp(IBV_QPT_RC, cq, NULL);
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
	take(cq, 1, IBV_WC_SUCCESS);
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

/* Datagrams with an address handle and a group; an XRC domain with its queues. */
static void other_objects(int arg)
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
	datagrams = make_qp(IBV_QPT_UD, cq, NULL);
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
static struct rdma_cm_id *next(struct rdma_event_channel *channel, enum rdma_cm_event_type kind)
{
	struct rdma_cm_event *event = event_within(channel, LONG);
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

static void take_events(struct rdma_event_channel *channel)
{
	struct rdma_cm_event *event;

	while ((event = event_within(channel, 0)))
		CODE(0, rdma_ack_cm_event(event));
}

static struct rdma_cm_id *make_id(struct rdma_event_channel *channel)
{
	struct rdma_cm_id *id;

	NEED(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	return id;
}

static void give_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { DEEP, DEEP, 1, 1, 64 } };
	struct ibv_recv_wr wr = { 0 }, *bad;

	NEED(rdma_create_qp(id, NULL, &attr) == 0);
	for (int i = 0; i < DEEP; i++)
		NEED(ibv_post_recv(id->qp, &wr, &bad) == 0);
}

/* The last step of an identifier before it is destroyed. */
enum step { CREATED, BOUND, LISTENS, RESOLVING, RESOLVED, ROUTED, WITH_QP, STEPS };

static struct rdma_cm_id *connect_to_port(enum step step, struct sockaddr_in *to)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr = to->sin_addr };
	struct rdma_cm_id *id = make_id(clients);

	if (step == BOUND || step == LISTENS)
		NEED(rdma_bind_addr(id, (struct sockaddr *)&any) == 0);
	if (step == LISTENS)
		NEED(rdma_listen(id, 3) == 0);
	if (step >= RESOLVING)
		NEED(rdma_resolve_addr(id, NULL, (struct sockaddr *)to, LONG) == 0);
	if (step >= RESOLVED)
		next(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
	if (step >= ROUTED) {
		NEED(rdma_resolve_route(id, LONG) == 0);
		next(clients, RDMA_CM_EVENT_ROUTE_RESOLVED);
	}
	if (step >= WITH_QP)
		give_qp(id);
	return id;
}

static void drop(struct rdma_cm_id *id)
{
	if (id->qp)
		rdma_destroy_qp(id);
	CODE(0, rdma_destroy_id(id));
}

static void destroyed_at(int step)
{
	drop(connect_to_port(step, &address));
}

/* No device has this address. */
static void cannot_resolve(int arg)
{
	struct sockaddr_in6 to = { .sin6_family = AF_INET6, .sin6_port = htons(9),
		.sin6_addr = { { { 0x20, 1, 0xd, 0xb8, [15] = 1 } } } };
	struct sockaddr_in from = address;
	struct rdma_cm_id *id = make_id(clients);

	(void)arg;
	from.sin_port = 0;
	if (rdma_resolve_addr(id, (struct sockaddr *)&from, (struct sockaddr *)&to, LONG) == 0)
		next(clients, RDMA_CM_EVENT_ADDR_ERROR);
	CODE(0, rdma_destroy_id(id));
}

static struct rdma_cm_id *asked(struct sockaddr_in *to)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1, .retry_count = 7,
		.rnr_retry_count = 7 };
	struct rdma_cm_id *id = connect_to_port(WITH_QP, to);

	CODE(0, rdma_connect(id, &param));
	return id;
}

static void refused(int arg)
{
	struct rdma_cm_id *id = asked(&no_listener);

	(void)arg;
	next(clients, RDMA_CM_EVENT_REJECTED);
	drop(id);
}

enum answer { REJECTS, DROPS, DROPS_WITH_QP, WITHDRAWN, ANSWERS };

static void not_accepted(int how)
{
	struct rdma_cm_id *client = asked(&address), *server;

	server = next(servers, RDMA_CM_EVENT_CONNECT_REQUEST);
	if (how == DROPS_WITH_QP || how == WITHDRAWN)
		give_qp(server);
	if (how == WITHDRAWN)
		drop(client);
	if (how == REJECTS)
		CODE(0, rdma_reject(server, "no", 2));
	drop(server);
	if (how != WITHDRAWN) {
		next(clients, RDMA_CM_EVENT_REJECTED);
		drop(client);
	}
	take_events(servers);
}

static struct rdma_cm_id *accepted(void)
{
	struct rdma_cm_id *server = next(servers, RDMA_CM_EVENT_CONNECT_REQUEST);

	give_qp(server);
	CODE(0, rdma_accept(server, NULL));
	next(clients, RDMA_CM_EVENT_ESTABLISHED);
	next(servers, RDMA_CM_EVENT_ESTABLISHED);
	return server;
}

/* What ends a connection first; the rest follows in the usual order. */
enum end { CLIENT_LEAVES, SERVER_LEAVES, BOTH_LEAVE, CLIENT_DESTROYED, SERVER_DESTROYED, QP_FAILS,
	QP_FIRST, ID_FIRST, ENDS };

/* The queue pair outlives its identifier, together with what was created for it. */
static void drop_id_first(struct rdma_cm_id *id)
{
	struct rdma_cm_id was = *id;

	CODE(0, rdma_destroy_id(id));
	CODE(0, ibv_destroy_qp(was.qp));
	CODE(0, ibv_destroy_cq(was.send_cq));
	CODE(0, ibv_destroy_cq(was.recv_cq));
	CODE(0, ibv_destroy_comp_channel(was.send_cq_channel));
	CODE(0, ibv_destroy_comp_channel(was.recv_cq_channel));
}

static void connected(int how)
{
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	struct rdma_cm_id *client = asked(&address), *server = accepted();
	struct ibv_qp *qp = client->qp;

	if (how == CLIENT_LEAVES || how == BOTH_LEAVE)
		CODE(0, rdma_disconnect(client));
	if (how == SERVER_LEAVES || how == BOTH_LEAVE)
		CODE(0, rdma_disconnect(server));
	if (how == QP_FAILS)
		CODE(0, ibv_modify_qp(qp, &error, IBV_QP_STATE));
	if (how == QP_FIRST)
		rdma_destroy_qp(client);
	if (how == CLIENT_DESTROYED)
		drop(client);
	if (how == SERVER_DESTROYED)
		drop(server);
	if (how == ID_FIRST)
		drop_id_first(client);
	if (how != SERVER_DESTROYED && how != QP_FIRST) {
		next(servers, RDMA_CM_EVENT_DISCONNECTED);
		drop(server);
	} else if (how == QP_FIRST) {
		drop(server);
	}
	if (how != CLIENT_DESTROYED && how != ID_FIRST)
		drop(client);
	take_events(servers);
	take_events(clients);
}

enum requests { WAITING, TAKEN, GONE, REQUESTS };

/* A listener is destroyed with requests: pending as events, one taken, or already withdrawn. Then
 * its channel is destroyed. */
static void listener_ends(int how)
{
	struct rdma_event_channel *own = rdma_create_event_channel();
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr = address.sin_addr };
	struct rdma_cm_id *listens, *asking[2], *request = NULL;

	NEED(own);
	listens = make_id(own);
	NEED(rdma_bind_addr(listens, (struct sockaddr *)&to) == 0 && rdma_listen(listens, 4) == 0);
	to.sin_port = rdma_get_src_port(listens);
	for (int i = 0; i < 2; i++)
		asking[i] = asked(&to);
	for (int i = 0; how == GONE && i < 2; i++)
		drop(asking[i]);
	if (how == TAKEN)
		request = next(own, RDMA_CM_EVENT_CONNECT_REQUEST);
	if (how == WAITING)
		NEED(poll(&(struct pollfd){ .fd = own->fd, .events = POLLIN }, 1, LONG) == 1);
	CODE(0, rdma_destroy_id(listens));
	if (request)
		drop(request);
	rdma_destroy_event_channel(own);
	for (int i = 0; how != GONE && i < 2; i++)
		drop(asking[i]);
	take_events(clients);
}

/* An identifier moves to another channel, and its old one is destroyed. */
static void channel_ends(int arg)
{
	struct rdma_event_channel *old = rdma_create_event_channel(), *now = rdma_create_event_channel();
	struct rdma_cm_id *id;

	(void)arg;
	NEED(old && now);
	id = make_id(old);
	NEED(rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, LONG) == 0);
	NEED(rdma_migrate_id(id, now) == 0);
	rdma_destroy_event_channel(old);
	NEED(poll(&(struct pollfd){ .fd = now->fd, .events = POLLIN }, 1, LONG) == 1);
	CODE(0, rdma_destroy_id(id));
	rdma_destroy_event_channel(now);
}

/* A datagram identifier in a group, which it leaves or not. */
static void in_a_group(int leaves)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_UD, .cap = { DEEP, DEEP, 1, 1, 0 } };
	struct sockaddr_in group = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(0xefff4d51) },
		from = address;
	struct rdma_cm_id *id;

	from.sin_port = 0;
	NEED(rdma_create_id(clients, &id, NULL, RDMA_PS_UDP) == 0);
	NEED(rdma_resolve_addr(id, (struct sockaddr *)&from, (struct sockaddr *)&group, LONG) == 0);
	next(clients, RDMA_CM_EVENT_ADDR_RESOLVED);
	NEED(rdma_create_qp(id, NULL, &attr) == 0);
	CODE(0, rdma_join_multicast(id, (struct sockaddr *)&group, NULL));
	next(clients, RDMA_CM_EVENT_MULTICAST_JOIN);
	if (leaves)
		CODE(0, rdma_leave_multicast(id, (struct sockaddr *)&group));
	else
		CODE(EBUSY, ibv_destroy_qp(id->qp));
	drop(id);
}

static const struct {
	const char *name;
	void (*way)(int);
	int from, to;
} ways[] = {
	{ "device", a_device, 0, 1 },
	{ "queue pair in a state", a_state, IBV_QPS_RESET, IBV_QPS_SQE },
	{ "failed queue pair", a_state, IBV_QPS_ERR, IBV_QPS_ERR + 1 },
	{ "shared receive queue", a_shared_queue, 0, 2 },
	{ "memory", each_kind_of_memory, IBV_MW_TYPE_1, IBV_MW_TYPE_2 + 1 },
	{ "datagrams and domains", other_objects, 0, 1 },
	{ "identifier after a step", destroyed_at, CREATED, STEPS },
	{ "unknown address", cannot_resolve, 0, 1 },
	{ "refused", refused, 0, 1 },
	{ "not accepted", not_accepted, REJECTS, ANSWERS },
	{ "connection", connected, CLIENT_LEAVES, ENDS },
	{ "listener", listener_ends, WAITING, REQUESTS },
	{ "channel", channel_ends, 0, 1 },
	{ "group", in_a_group, 0, 2 },
};

static void arrange(void)
{
	struct rdma_cm_id *closed;

	address = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	no_listener = address;
	context = open_first();
	NEED(pd = ibv_alloc_pd(context));
	NEED((servers = rdma_create_event_channel()) && (clients = rdma_create_event_channel()));
	listener = make_id(servers);
	NEED(rdma_bind_addr(listener, (struct sockaddr *)&address) == 0 && rdma_listen(listener, 8) == 0);
	address.sin_port = rdma_get_src_port(listener);
	/* The port of a socket that does not listen. */
	closed = make_id(servers);
	NEED(rdma_bind_addr(closed, (struct sockaddr *)&no_listener) == 0);
	no_listener.sin_port = rdma_get_src_port(closed);
}

int main(int argc, char **argv)
{
	roce = argc > 1 && !strcmp(argv[1], "roce");
	arrange();
	for (unsigned i = 0; i < sizeof(ways) / sizeof(*ways); i++)
		for (int arg = ways[i].from; arg < ways[i].to; arg++)
			if (argc < 3 || !strcmp(argv[2], ways[i].name))
				check_no_leaks(ways[i].name, ways[i].way, arg, ROUNDS);
	return result();
}
