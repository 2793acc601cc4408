/* Tests of rdma_migrate_id between the program's channel and the identifier's own channel, and of
 * the clean-up after failed calls. */
#include "check.h"
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <sys/socket.h>
#include <unistd.h>

static struct sockaddr_in loopback(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET };

	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return a;
}

static struct rdma_event_channel *channel;

static struct rdma_cm_event *expect_event(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event = NULL;

	NEED(rdma_get_cm_event(channel, &event) == 0);
	CODE((int)type, (int)event->event);
	return event;
}

static struct rdma_cm_id *create_listener(struct rdma_event_channel *to_channel,
	struct sockaddr_in *addr)
{
	struct rdma_cm_id *id;

	*addr = loopback();
	NEED(rdma_create_id(to_channel, &id, NULL, RDMA_PS_TCP) == 0);
	NEED(rdma_bind_addr(id, (struct sockaddr *)addr) == 0 && rdma_listen(id, 4) == 0);
	addr->sin_port = rdma_get_src_port(id);
	return id;
}

/* Starts a connection attempt without waiting for the reply. */
static struct rdma_cm_id *start_connecting(struct sockaddr_in addr)
{
	struct ibv_qp_init_attr attr = { .cap = { 4, 4, 1, 1, 16 }, .qp_type = IBV_QPT_RC };
	struct rdma_event_channel *own = rdma_create_event_channel();
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	NEED(own && rdma_create_id(own, &id, NULL, RDMA_PS_TCP) == 0);
	NEED(rdma_resolve_addr(id, NULL, (struct sockaddr *)&addr, 2000) == 0 &&
		rdma_get_cm_event(own, &event) == 0);
	CODE(0, rdma_ack_cm_event(event));
	NEED(rdma_resolve_route(id, 2000) == 0 && rdma_get_cm_event(own, &event) == 0);
	CODE(0, rdma_ack_cm_event(event));
	NEED(rdma_create_qp(id, NULL, &attr) == 0 && rdma_connect(id, NULL) == 0);
	return id;
}

static void destroy_client(struct rdma_cm_id *id)
{
	struct rdma_event_channel *own = id->channel;

	rdma_destroy_qp(id);
	CODE(0, rdma_destroy_id(id));
	rdma_destroy_event_channel(own);
}

/* After a listener moves to the program's channel, its connection requests and their later events
 * arrive at this channel. */
static void test_migrate_to_program_channel(void)
{
	struct ibv_qp_init_attr attr = { .cap = { 4, 4, 1, 1, 16 }, .qp_type = IBV_QPT_RC };
	struct sockaddr_in addr;
	struct rdma_cm_id *listener = create_listener(NULL, &addr), *id, *client, *none;
	struct rdma_cm_event *event;

	CODE(0, rdma_migrate_id(listener, channel));
	CHECK(listener->channel == channel);
	MINUS_ONE(EINVAL, rdma_get_request(listener, &none));
	client = start_connecting(addr);
	event = expect_event(RDMA_CM_EVENT_CONNECT_REQUEST);
	id = event->id;
	CHECK(id->channel == channel && !id->event);
	CODE(0, rdma_ack_cm_event(event));
	CODE(0, rdma_create_qp(id, NULL, &attr));
	CODE(0, rdma_accept(id, NULL));
	event = expect_event(RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->id == id && !id->event);
	CODE(0, rdma_ack_cm_event(event));
	rdma_destroy_qp(id);
	CODE(0, rdma_destroy_id(id));
	CODE(0, rdma_destroy_id(listener));
	destroy_client(client);
}

/* After a listener moves to its own channel, its calls and those of its requests are
 * synchronous. */
static void test_migrate_to_own_channel(void)
{
	struct ibv_qp_init_attr attr = { .cap = { 4, 4, 1, 1, 16 }, .qp_type = IBV_QPT_RC };
	struct sockaddr_in addr;
	struct rdma_cm_id *listener = create_listener(channel, &addr), *client, *id;

	CODE(0, rdma_migrate_id(listener, NULL));
	CHECK(listener->channel && listener->channel != channel);
	client = start_connecting(addr);
	NEED(rdma_get_request(listener, &id) == 0);
	CHECK(id->channel != channel && id->channel != listener->channel && id->event);
	CODE(0, rdma_create_qp(id, NULL, &attr));
	CODE(0, rdma_accept(id, NULL));
	CHECK(id->event && id->event->event == RDMA_CM_EVENT_ESTABLISHED);
	rdma_destroy_ep(id);
	CODE(0, rdma_destroy_id(listener));
	destroy_client(client);
}

/* Moving an identifier acknowledges the event that its last synchronous call stored. */
static void test_migrate_with_stored_event(void)
{
	struct sockaddr_in addr = loopback();
	struct rdma_cm_id *id;
	int i;

	for (i = 0; i < 4; i++) {
		NEED(rdma_create_id(i & 1 ? channel : NULL, &id, NULL, RDMA_PS_TCP) == 0);
		if (i & 1)
			CODE(0, rdma_migrate_id(id, NULL));
		CODE(0, rdma_resolve_addr(id, NULL, (struct sockaddr *)&addr, 2000));
		CHECK(id->event && id->event->event == RDMA_CM_EVENT_ADDR_RESOLVED);
		CODE(0, rdma_migrate_id(id, i & 2 ? channel : NULL));
		CHECK(!id->event && (id->channel == channel) == (i >> 1));
		CODE(0, rdma_resolve_route(id, 2000));
		if (i & 2)
			CODE(0, rdma_ack_cm_event(expect_event(RDMA_CM_EVENT_ROUTE_RESOLVED)));
		else
			CHECK(id->event && id->event->event == RDMA_CM_EVENT_ROUTE_RESOLVED);
		CODE(0, rdma_destroy_id(id));
	}
}

/* If rdma_create_qp fails, it destroys the completion queues that it has created. If
 * rdma_destroy_srq fails because the queue is in use, rdma_destroy_ep destroys the queue later. */
static void test_failed_calls_clean_up(void)
{
	struct ibv_qp_init_attr attr = { .cap = { 4, 4, 1, 1, 16 }, .qp_type = IBV_QPT_RC };
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct sockaddr_in addr = loopback();
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	int i;

	for (i = 0; i < 2; i++) {
		struct ibv_qp_init_attr bad = attr, good = attr;

		*(i ? &bad.cap.max_recv_wr : &bad.cap.max_send_wr) = 1 << 30;
		NEED(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
		NEED(rdma_resolve_addr(id, NULL, (struct sockaddr *)&addr, 2000) == 0 &&
			(pd = ibv_alloc_pd(id->verbs)));
		MINUS_ONE(EINVAL, rdma_create_qp(id, pd, &bad));
		CHECK(!id->qp && !id->send_cq && !id->recv_cq && !id->send_cq_channel && !id->recv_cq_channel);
		CODE(0, rdma_create_srq(id, pd, &srq));
		CODE(0, rdma_create_qp(id, pd, &good));
		rdma_destroy_srq(id);
		CHECK(id->srq && id->qp->srq == id->srq);
		CODE(EBUSY, ibv_dealloc_pd(pd));
		rdma_destroy_ep(id);
		CODE(0, ibv_dealloc_pd(pd));
	}
}

int main(void)
{
	alarm(50);
	NEED((channel = rdma_create_event_channel()));
	test_migrate_to_program_channel();
	test_migrate_to_own_channel();
	test_migrate_with_stored_event();
	test_failed_calls_clean_up();
	rdma_destroy_event_channel(channel);
	return result();
}
