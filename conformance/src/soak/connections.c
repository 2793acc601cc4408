/* Connections: set-up, graceful close, loss, and tear-down. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#include "soak.h"

enum {
	RETRY_MS = 300, /* milliseconds until a connection is tried again */
	/* milliseconds within which all completions of a failed connection must arrive */
	DRAIN_LIMIT_MS = 60000,
};

static struct rdma_event_channel *channel;
static struct rdma_cm_id *listener;
static struct ibv_context *common;
static uint64_t try_again[PAIRS];

int count(enum state state)
{
	int n = 0;

	for (int i = 0; i < PLACES; i++)
		n += pairs[i].state == state;
	return n;
}

static void enter(struct pair *p, enum state state)
{
	p->state = state;
	p->since = now_ms();
}

/* Creates the objects that all connections share. Returns 0. */
int open_common(struct ibv_context *verbs)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = SHARED, .max_sge = 1 } };

	if (common)
		return common == verbs ? 0 : (wrong("the connection manager has another device"),
					      -1);
	pd = ibv_alloc_pd(verbs);
	completions = ibv_create_comp_channel(verbs);
	if (!pd || !completions)
		wrong("creating a protection domain and a completion channel: %s", strerror(errno));
	for (int i = 0; i < 2; i++)
		queues[i] = ibv_create_cq(verbs, PLACES * (DEPTH + RECEIVES), NULL, completions, 0);
	srq = ibv_create_srq(pd, &attr);
	if (!queues[0] || !queues[1] || !srq)
		wrong("creating the queues: %s", strerror(errno));
	fcntl(completions->fd, F_SETFL, O_NONBLOCK);
	fcntl(verbs->async_fd, F_SETFL, O_NONBLOCK);
	for (int i = 0; i < SHARED; i++)
		post_shared(i);
	common = verbs;
	return 0;
}

static struct pair *free_place(void)
{
	for (int i = 0; i < PLACES; i++)
		if (pairs[i].state == NONE)
			return &pairs[i];
	return NULL;
}

static void tear_down(struct pair *p)
{
	if (p->id->qp)
		rdma_destroy_qp(p->id);
	if (p->mw && ibv_dealloc_mw(p->mw))
		wrong("ibv_dealloc_mw: %s", strerror(errno));
	if (p->mr && ibv_dereg_mr(p->mr))
		wrong("ibv_dereg_mr: %s", strerror(errno));
	if (p->arena)
		munmap(p->arena, sizeof(*p->arena));
	if (rdma_destroy_id(p->id))
		wrong("rdma_destroy_id: %s", strerror(errno));
	memset(p, 0, sizeof(*p));
}

/* Creates the queue pair and its memory. Returns 0, or -1 and sets errno. */
static int create_resources(struct pair *p)
{
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC,
					 .cap = { DEPTH, RECEIVES, 1, 1, 64 } };

	open_common(p->id->verbs);
	p->arena = mmap(NULL, sizeof(*p->arena), PROT_READ | PROT_WRITE, MAP_PRIVATE |
			MAP_ANONYMOUS, -1, 0);
	if (p->arena == MAP_FAILED) {
		p->arena = NULL;
		return -1;
	}
	p->shared = p->index % 2;
	attr.send_cq = queues[p->index / 2 % 2];
	attr.recv_cq = queues[p->index / 4 % 2];
	attr.srq = p->shared ? srq : NULL;
	p->mr = ibv_reg_mr(pd, p->arena, sizeof(*p->arena), access);
	p->mw = p->mr ? ibv_alloc_mw(pd, IBV_MW_TYPE_2) : NULL;
	if (!p->mw || rdma_create_qp(p->id, pd, &attr))
		return -1;
	p->window_key = p->mw->rkey;
	p->mine = number();
	start_operations(p);
	return 0;
}

static struct rdma_conn_param parameters(const struct pair *p, struct hello *hello)
{
	struct rdma_conn_param param = { .responder_resources = 8, .initiator_depth = 8 };

	*hello = (struct hello){ (uintptr_t)&p->arena->exposed, p->mine, p->mr->rkey,
				(uint32_t)p->index };
	param.private_data = hello;
	param.private_data_len = sizeof(*hello);
	return param;
}

static void read_hello(struct pair *p, const struct rdma_cm_event *event)
{
	struct hello hello;

	if (event->param.conn.private_data_len < sizeof(hello))
		wrong("connection %d: %d octets of private data", p->index,
		      event->param.conn.private_data_len);
	memcpy(&hello, event->param.conn.private_data, sizeof(hello));
	p->remote = hello.addr;
	p->theirs = hello.seed;
	p->rkey = hello.rkey;
	p->index = (int)hello.index;
}

/* Gives up a connection attempt, which does not count as a lost connection. */
static void give_up(struct pair *p, const char *why)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

	totals.attempts_failed++;
	say("failed index=%d why=%s", p->index, why);
	if (!listener)
		try_again[p->index] = now_ms() + RETRY_MS + number() % RETRY_MS;
	rdma_disconnect(p->id);
	/* Flush the receives, also if the queue pair was never connected. */
	if (p->id->qp)
		ibv_modify_qp(p->id->qp, &attr, IBV_QP_STATE);
	p->disconnected = 1;
	enter(p, DRAINING);
}

void lose(struct pair *p, const char *why)
{
	if (p->state == CONNECTING) {
		give_up(p, why);
		return;
	}
	if (p->state != LIVE)
		return;
	if (p->farewell_sent && p->farewell_received && idle(p)) {
		/* The client has closed the connection gracefully. */
		totals.closed++;
		rdma_disconnect(p->id);
		enter(p, DRAINING);
		return;
	}
	totals.lost++;
	say("lost index=%d why=%s", p->index, why);
	if (!listener)
		try_again[p->index] = now_ms() + RETRY_MS + number() % RETRY_MS;
	rdma_disconnect(p->id);
	enter(p, DRAINING);
}

static void request_arrived(struct rdma_cm_event *event)
{
	struct pair *p = free_place();
	struct rdma_conn_param param;
	struct hello hello;
	int status = -1;

	if (!p) {
		rdma_reject(event->id, NULL, 0);
		return;
	}
	memset(p, 0, sizeof(*p));
	p->id = event->id;
	p->id->context = p;
	read_hello(p, event);
	/* Not a connection that is being closed gracefully: its last completions may not have been polled
	 * yet. */
	for (int i = 0; i < PLACES; i++)
		if (pairs[i].state == LIVE && pairs[i].index ==
			p->index && !pairs[i].farewell_sent &&
		    &pairs[i] != p)
			lose(&pairs[i], "the client has connected again");
	enter(p, CONNECTING);
	if (create_resources(p) == 0) {
		param = parameters(p, &hello);
		status = rdma_accept(p->id, &param);
	}
	if (status)
		give_up(p, strerror(errno));
}

static void established(struct pair *p, const struct rdma_cm_event *event)
{
	if (p->state != CONNECTING)
		return;
	if (!listener)
		read_hello(p, event);
	totals.made++;
	enter(p, LIVE);
}

static void disconnected(struct pair *p)
{
	while (poll_completions())
		;
	p->disconnected = 1;
	lose(p, "disconnected");
}

static void resolved(struct pair *p, enum rdma_cm_event_type type)
{
	struct rdma_conn_param param;
	struct hello hello;

	if (type == RDMA_CM_EVENT_ADDR_RESOLVED) {
		if (rdma_resolve_route(p->id, 2000))
			give_up(p, strerror(errno));
		return;
	}
	if (create_resources(p)) {
		give_up(p, strerror(errno));
		return;
	}
	param = parameters(p, &hello);
	enter(p, CONNECTING);
	if (rdma_connect(p->id, &param))
		give_up(p, strerror(errno));
}

static void handle(struct rdma_cm_event *event)
{
	struct pair *p = event->id == listener ? NULL : event->id->context;

	switch (event->event) {
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		request_arrived(event);
		break;
	case RDMA_CM_EVENT_ADDR_RESOLVED:
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		resolved(p, event->event);
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
		established(p, event);
		break;
	case RDMA_CM_EVENT_DISCONNECTED:
		disconnected(p);
		break;
	case RDMA_CM_EVENT_TIMEWAIT_EXIT:
	case RDMA_CM_EVENT_ADDR_CHANGE:
		break;
	case RDMA_CM_EVENT_DEVICE_REMOVAL:
		wrong("the device was removed");
	default:
		if (p && p->state != DRAINING)
			give_up(p, rdma_event_str(event->event));
	}
}

int connection_events(void)
{
	struct rdma_cm_event *event;
	int n = 0;

	while (channel && rdma_get_cm_event(channel, &event) == 0) {
		struct rdma_cm_event copy = *event;
		char data[256] = { 0 };

		/* Acknowledge the event before handling it, because identifiers with open events cannot be
		 * destroyed. */
		if (copy.event == RDMA_CM_EVENT_CONNECT_REQUEST ||
		    copy.event == RDMA_CM_EVENT_ESTABLISHED)
			if (copy.param.conn.private_data_len && copy.param.conn.private_data) {
				memcpy(data, copy.param.conn.private_data,
				       copy.param.conn.private_data_len);
				copy.param.conn.private_data = data;
			}
		rdma_ack_cm_event(event);
		handle(&copy);
		n++;
	}
	return n;
}

void asynchronous_events(void)
{
	struct ibv_async_event event;

	while (common && ibv_get_async_event(common, &event) == 0) {
		for (int i = 0; i < PLACES &&
		     event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED; i++)
			if (pairs[i].state != NONE && pairs[i].id->qp == event.element.qp)
				pairs[i].last_receive = 1;
		if (event.event_type == IBV_EVENT_CQ_ERR)
			wrong("a completion queue has overflowed");
		ibv_ack_async_event(&event);
	}
}

static void open_channel(void)
{
	channel = rdma_create_event_channel();
	if (!channel)
		wrong("rdma_create_event_channel: %s", strerror(errno));
	fcntl(channel->fd, F_SETFL, O_NONBLOCK);
}

int channel_fd(void)
{
	return channel->fd;
}

int async_fd(void)
{
	return common ? common->async_fd : -1;
}

static struct sockaddr_in socket_address(const char *address, int port)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };

	inet_pton(AF_INET, address, &at.sin_addr);
	return at;
}

void listen_at(const char *address, int port)
{
	struct sockaddr_in at = socket_address(address, port);

	open_channel();
	if (rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) ||
	    rdma_bind_addr(listener, (struct sockaddr *)&at) ||
	    rdma_listen(listener, 2 * PAIRS))
		wrong("listening: %s", strerror(errno));
}

static void open_one(int index, struct sockaddr_in at)
{
	struct pair *p = free_place();

	try_again[index] = now_ms() + RETRY_MS + number() % RETRY_MS;
	if (!p)
		return;
	memset(p, 0, sizeof(*p));
	p->may_speak = 1;
	p->index = index;
	if (rdma_create_id(channel, &p->id, p, RDMA_PS_TCP)) {
		totals.attempts_failed++;
		say("failed index=%d why=%s", index, strerror(errno));
		return;
	}
	enter(p, RESOLVING);
	if (rdma_resolve_addr(p->id, NULL, (struct sockaddr *)&at, 2000))
		give_up(p, strerror(errno));
}

void keep_connected(const char *address, int port)
{
	char open[PAIRS] = { 0 };

	if (!channel)
		open_channel();
	for (int i = 0; i < PLACES; i++)
		if (pairs[i].state != NONE && pairs[i].state != DRAINING)
			open[pairs[i].index] = 1;
	for (int i = 0; i < PAIRS; i++)
		if (!open[i] && now_ms() >= try_again[i])
			open_one(i, socket_address(address, port));
}

void churn(int most)
{
	int first = (int)(number() % PLACES);

	for (int i = 0; i < PLACES && most > 0; i++) {
		struct pair *p = &pairs[(first + i) % PLACES];
		if (p->state == LIVE && !p->farewell_sent && p->in_flight < DEPTH) {
			say_farewell(p);
			most--;
		}
	}
}

/* Returns whether all completions of a queue pair in the error state have arrived. */
static int has_drained(const struct pair *p)
{
	return p->in_flight == 0 && p->received_posted == 0 &&
		(p->disconnected || now_ms() - p->since > 1000) &&
	       (!p->shared || p->last_receive || !p->id->qp);
}

void advance_connections(void)
{
	for (int i = 0; i < PLACES; i++) {
		struct pair *p = &pairs[i];

		if (p->state == LIVE && p->farewell_received && !p->farewell_sent && idle(p))
			say_farewell(p);
		/* The client disconnects when both have said farewell. */
		if (p->state ==
			LIVE && !listener && p->farewell_sent && p->farewell_received && idle(p)) {
			totals.closed++;
			try_again[p->index] = 0;
			rdma_disconnect(p->id);
			enter(p, DRAINING);
		}
		if (p->state == DRAINING && has_drained(p)) {
			while (poll_completions())
				;
			tear_down(p);
		} else if (p->state == DRAINING && now_ms() - p->since > DRAIN_LIMIT_MS) {
			wrong("connection %d: completions of %d requests and %d receives, "
			      "or the last-WQE event (%d), did not arrive in time",
			      p->index, p->in_flight, p->received_posted, p->last_receive);
		}
	}
}
