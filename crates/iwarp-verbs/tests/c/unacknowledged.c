/* Tests of calls that wait until the program has acknowledged all events of an object. They destroy
 * or move the object, or leave a group. Each test makes the call in another thread, and
 * acknowledges the events after a pause. A call that does not wait returns during the pause. */
#include "check.h"
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PAUSE_US = 30000 };

struct call {
	int (*function)(void *);
	void *object;
	_Atomic int returned;
	pthread_t thread;
};

static struct ibv_context *context;
static struct ibv_pd *pd;

static void *run(void *arg)
{
	struct call *call = arg;

	CODE(0, call->function(call->object));
	call->returned = 1;
	return NULL;
}

/* Starts a call in another thread, and checks that it has not returned after a pause. */
static void expect_blocked(struct call *call)
{
	call->returned = 0;
	NEED(pthread_create(&call->thread, NULL, run, call) == 0);
	usleep(PAUSE_US);
	CHECK(!call->returned);
}

static void expect_return(struct call *call)
{
	NEED(pthread_join(call->thread, NULL) == 0);
	CHECK(call->returned);
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

static void move_to(struct ibv_qp *qp, enum ibv_qp_state state, int mask, const union ibv_gid *peer,
	uint32_t number)
{
	struct ibv_qp_attr a = { .qp_state = state, .port_num = 1, .dest_qp_num = number,
		.ah_attr = { .is_global = 1, .port_num = 1 } };

	if (peer)
		a.ah_attr.grh.dgid = *peer;
	NEED(ibv_modify_qp(qp, &a, IBV_QP_STATE | mask) == 0);
}

static struct ibv_qp *create_qp(struct ibv_cq *cq, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);

	NEED(qp);
	move_to(qp, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, NULL, 0);
	return qp;
}

/* Destroying a completion queue waits for the acknowledgment of both its events. */
static void test_completion_events(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq *cq = ibv_create_cq(context, 8, NULL, channel, 0), *got;
	struct call call = { .function = destroy_cq, .object = cq };
	struct ibv_recv_wr wr = { 0 }, *bad;
	void *own;
	int i;

	NEED(channel && cq);
	for (i = 0; i < 2; i++) {
		struct ibv_qp *qp = create_qp(cq, NULL);

		NEED(ibv_req_notify_cq(cq, 0) == 0 && ibv_post_recv(qp, &wr, &bad) == 0);
		move_to(qp, IBV_QPS_ERR, 0, NULL, 0);
		NEED(ibv_get_cq_event(channel, &got, &own) == 0);
		CHECK(got == cq);
		CODE(0, ibv_destroy_qp(qp));
	}
	expect_blocked(&call);
	ibv_ack_cq_events(cq, 1);
	usleep(PAUSE_US);
	CHECK(!call.returned);
	ibv_ack_cq_events(cq, 1);
	expect_return(&call);
	CODE(0, ibv_destroy_comp_channel(channel));
}

/* Returns the next asynchronous event, without COMM_EST events, which depend on the order of
 * threads. */
static struct ibv_async_event next_async_event(enum ibv_event_type type)
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

/* Destroying a shared receive queue waits for its limit event, and destroying a queue pair for its
 * LAST_WQE_REACHED event. */
static void test_async_events(void)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &attr);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct call end_srq = { .function = destroy_srq, .object = srq }, end_qp = { .function =
		destroy_qp };
	struct ibv_srq_attr limit = { .srq_limit = 2 };
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad_send;
	struct ibv_recv_wr recv = { 0 }, *bad;
	struct ibv_async_event limit_event, last_wqe_event;
	struct ibv_qp *sender, *receiver;
	union ibv_gid gid;
	int i;

	NEED(srq && cq && ibv_query_gid(context, 1, 0, &gid) == 0);
	sender = create_qp(cq, NULL);
	receiver = create_qp(cq, srq);
	for (i = 0; i < 3; i++)
		NEED(ibv_post_srq_recv(srq, &recv, &bad) == 0);
	CODE(0, ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT));
	move_to(sender, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_DEST_QPN, &gid, receiver->qp_num);
	move_to(receiver, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_DEST_QPN, &gid, sender->qp_num);
	move_to(sender, IBV_QPS_RTS, 0, NULL, 0);
	move_to(receiver, IBV_QPS_RTS, 0, NULL, 0);
	for (i = 0; i < 2; i++)
		NEED(ibv_post_send(sender, &send, &bad_send) == 0);
	limit_event = next_async_event(IBV_EVENT_SRQ_LIMIT_REACHED);
	CHECK(limit_event.element.srq == srq);
	move_to(receiver, IBV_QPS_ERR, 0, NULL, 0);
	last_wqe_event = next_async_event(IBV_EVENT_QP_LAST_WQE_REACHED);
	CHECK(last_wqe_event.element.qp == receiver);
	end_qp.object = receiver;
	expect_blocked(&end_qp);
	ibv_ack_async_event(&last_wqe_event);
	expect_return(&end_qp);
	expect_blocked(&end_srq);
	ibv_ack_async_event(&limit_event);
	expect_return(&end_srq);
	CODE(0, ibv_destroy_qp(sender));
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

static struct rdma_cm_event *expect_event(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event = NULL;

	NEED(rdma_get_cm_event(channel, &event) == 0);
	CODE((int)type, (int)event->event);
	return event;
}

/* Moving an identifier, leaving a group, and destroying the identifier wait for its events. */
static void test_cm_events(void)
{
	struct sockaddr_in loopback = { .sin_family = AF_INET };
	struct ibv_qp_init_attr attr = { .cap = { 4, 4, 1, 1, 16 }, .qp_type = IBV_QPT_UD };
	struct call call = { 0 };
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	group.sin_addr.s_addr = htonl(0xefff4d12);
	channel = rdma_create_event_channel();
	other = rdma_create_event_channel();
	NEED(channel && other && rdma_create_id(channel, &id, NULL, RDMA_PS_UDP) == 0);
	call.object = id;
	NEED(rdma_resolve_addr(id, (struct sockaddr *)&loopback, (struct sockaddr *)&group, 2000) == 0);
	event = expect_event(RDMA_CM_EVENT_ADDR_RESOLVED);
	call.function = migrate;
	expect_blocked(&call);
	CODE(0, rdma_ack_cm_event(event));
	expect_return(&call);
	CHECK(id->channel == other);
	rdma_destroy_event_channel(channel);
	channel = other;
	NEED(rdma_create_qp(id, NULL, &attr) == 0);
	NEED(rdma_join_multicast(id, (struct sockaddr *)&group, NULL) == 0);
	event = expect_event(RDMA_CM_EVENT_MULTICAST_JOIN);
	call.function = leave;
	expect_blocked(&call);
	CODE(0, rdma_ack_cm_event(event));
	expect_return(&call);
	NEED(rdma_join_multicast(id, (struct sockaddr *)&group, NULL) == 0);
	event = expect_event(RDMA_CM_EVENT_MULTICAST_JOIN);
	rdma_destroy_qp(id);
	call.function = destroy_id;
	expect_blocked(&call);
	CODE(0, rdma_ack_cm_event(event));
	expect_return(&call);
	rdma_destroy_event_channel(channel);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	NEED(list && list[0] && (context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	NEED((pd = ibv_alloc_pd(context)));
	test_completion_events();
	test_async_events();
	test_cm_events();
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	return result();
}
