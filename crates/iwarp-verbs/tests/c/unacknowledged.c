/* Destroying an object, and other calls that end the subject of events, wait until the events
 * are acknowledged. A call that does not wait would return while the acknowledging thread still
 * sleeps. */
#include "check.h"
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PAUSE_US = 30000 };

struct call {
	int (*make)(void *);
	void *object;
	_Atomic int over;
	pthread_t thread;
};

static struct ibv_context *context;
static struct ibv_pd *pd;

static void *run(void *of)
{
	struct call *call = of;

	CODE(0, call->make(call->object));
	call->over = 1;
	return NULL;
}

/* Starts a call that must wait, and checks that it does. */
static void waits(struct call *call)
{
	call->over = 0;
	NEED(pthread_create(&call->thread, NULL, run, call) == 0);
	usleep(PAUSE_US);
	CHECK(!call->over);
}

static void returns(struct call *call)
{
	NEED(pthread_join(call->thread, NULL) == 0);
	CHECK(call->over);
}

static int destroy_cq(void *cq)
{
	return ibv_destroy_cq(cq);
}

static int destroy_qp(void *qp)
{
	return ibv_destroy_qp(qp);
}

static int destroy_srq(void *srq)
{
	return ibv_destroy_srq(srq);
}

static void to(struct ibv_qp *qp, enum ibv_qp_state state, int mask, const union ibv_gid *peer,
	uint32_t number)
{
	struct ibv_qp_attr a = { .qp_state = state, .port_num = 1, .dest_qp_num = number,
		.ah_attr = { .is_global = 1, .port_num = 1 } };

	if (peer)
		a.ah_attr.grh.dgid = *peer;
	NEED(ibv_modify_qp(qp, &a, IBV_QP_STATE | mask) == 0);
}

static struct ibv_qp *make(struct ibv_cq *cq, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);

	NEED(qp);
	to(qp, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, NULL, 0);
	return qp;
}

/* Completion events; two are acknowledged one after the other. */
static void completion_events(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq *cq = ibv_create_cq(context, 8, NULL, channel, 0), *got;
	struct call call = { .make = destroy_cq, .object = cq };
	struct ibv_recv_wr wr = { 0 }, *bad;
	void *own;
	int i;

	NEED(channel && cq);
	for (i = 0; i < 2; i++) {
		struct ibv_qp *qp = make(cq, NULL);

		NEED(ibv_req_notify_cq(cq, 0) == 0 && ibv_post_recv(qp, &wr, &bad) == 0);
		to(qp, IBV_QPS_ERR, 0, NULL, 0);
		NEED(ibv_get_cq_event(channel, &got, &own) == 0);
		CHECK(got == cq);
		CODE(0, ibv_destroy_qp(qp));
	}
	waits(&call);
	ibv_ack_cq_events(cq, 1);
	usleep(PAUSE_US);
	CHECK(!call.over);
	ibv_ack_cq_events(cq, 1);
	returns(&call);
	CODE(0, ibv_destroy_comp_channel(channel));
}

/* Returns the next event. COMM_EST depends on the order of the threads and is skipped. */
static struct ibv_async_event event_of(enum ibv_event_type type)
{
	struct ibv_async_event event;

	for (;;) {
		NEED(ibv_get_async_event(context, &event) == 0);
		if (event.event_type != IBV_EVENT_COMM_EST)
			break;
		ibv_ack_async_event(&event);
	}
	CODE(type, event.event_type);
	return event;
}

/* The limit event of a shared receive queue, and LAST_WQE_REACHED of one of its queue pairs. */
static void asynchronous_events(void)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &attr);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct call end_srq = { .make = destroy_srq, .object = srq }, end_qp = { .make = destroy_qp };
	struct ibv_srq_attr limit = { .srq_limit = 2 };
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad_send;
	struct ibv_recv_wr recv = { 0 }, *bad;
	struct ibv_async_event short_of, last;
	struct ibv_qp *from, *at;
	union ibv_gid gid;
	int i;

	NEED(srq && cq && ibv_query_gid(context, 1, 0, &gid) == 0);
	from = make(cq, NULL);
	at = make(cq, srq);
	for (i = 0; i < 3; i++)
		NEED(ibv_post_srq_recv(srq, &recv, &bad) == 0);
	CODE(0, ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT));
	to(from, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_DEST_QPN, &gid, at->qp_num);
	to(at, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_DEST_QPN, &gid, from->qp_num);
	to(from, IBV_QPS_RTS, 0, NULL, 0);
	to(at, IBV_QPS_RTS, 0, NULL, 0);
	for (i = 0; i < 2; i++)
		NEED(ibv_post_send(from, &send, &bad_send) == 0);
	short_of = event_of(IBV_EVENT_SRQ_LIMIT_REACHED);
	CHECK(short_of.element.srq == srq);
	to(at, IBV_QPS_ERR, 0, NULL, 0);
	last = event_of(IBV_EVENT_QP_LAST_WQE_REACHED);
	CHECK(last.element.qp == at);
	end_qp.object = at;
	waits(&end_qp);
	ibv_ack_async_event(&last);
	returns(&end_qp);
	waits(&end_srq);
	ibv_ack_async_event(&short_of);
	returns(&end_srq);
	CODE(0, ibv_destroy_qp(from));
	CODE(0, ibv_destroy_cq(cq));
}

static struct rdma_event_channel *channel, *other;
static struct sockaddr_in group = { .sin_family = AF_INET };

static int destroy_id(void *id)
{
	return rdma_destroy_id(id);
}

static int migrate(void *id)
{
	return rdma_migrate_id(id, other);
}

static int leave(void *id)
{
	return rdma_leave_multicast(id, (struct sockaddr *)&group);
}

static struct rdma_cm_event *next(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event = NULL;

	NEED(rdma_get_cm_event(channel, &event) == 0);
	CODE((int)type, (int)event->event);
	return event;
}

/* Events of an identifier that moves to another channel, leaves a group, and is destroyed. */
static void identifiers(void)
{
	struct sockaddr_in here = { .sin_family = AF_INET };
	struct ibv_qp_init_attr attr = { .cap = { 4, 4, 1, 1, 16 }, .qp_type = IBV_QPT_UD };
	struct call call = { 0 };
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	group.sin_addr.s_addr = htonl(0xefff4d12);
	channel = rdma_create_event_channel();
	other = rdma_create_event_channel();
	NEED(channel && other && rdma_create_id(channel, &id, NULL, RDMA_PS_UDP) == 0);
	call.object = id;
	NEED(rdma_resolve_addr(id, (struct sockaddr *)&here, (struct sockaddr *)&group, 2000) == 0);
	event = next(RDMA_CM_EVENT_ADDR_RESOLVED);
	call.make = migrate;
	waits(&call);
	CODE(0, rdma_ack_cm_event(event));
	returns(&call);
	CHECK(id->channel == other);
	rdma_destroy_event_channel(channel);
	channel = other;
	NEED(rdma_create_qp(id, NULL, &attr) == 0);
	NEED(rdma_join_multicast(id, (struct sockaddr *)&group, NULL) == 0);
	event = next(RDMA_CM_EVENT_MULTICAST_JOIN);
	call.make = leave;
	waits(&call);
	CODE(0, rdma_ack_cm_event(event));
	returns(&call);
	NEED(rdma_join_multicast(id, (struct sockaddr *)&group, NULL) == 0);
	event = next(RDMA_CM_EVENT_MULTICAST_JOIN);
	rdma_destroy_qp(id);
	call.make = destroy_id;
	waits(&call);
	CODE(0, rdma_ack_cm_event(event));
	returns(&call);
	rdma_destroy_event_channel(channel);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	NEED(list && list[0] && (context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	NEED((pd = ibv_alloc_pd(context)));
	completion_events();
	asynchronous_events();
	identifiers();
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	return result();
}
