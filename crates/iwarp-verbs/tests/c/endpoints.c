/* Tests of endpoints: the parameters that the peer receives, and the objects and values that the
 * synchronous calls create and report. */
#include "check.h"
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <sys/socket.h>

enum { DATA_LEN = 200 };

static char port[8];
static unsigned char data[DATA_LEN];

static struct ibv_qp_init_attr attributes(void)
{
	struct ibv_qp_init_attr attr =
		{ .cap = { .max_send_wr = 3, .max_recv_wr = 3, .max_send_sge = 1, .max_recv_sge = 1,
		.max_inline_data = 1 }, .qp_type = IBV_QPT_RC };

	return attr;
}

static struct rdma_cm_id *create_listener(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP,
		.ai_flags = RAI_PASSIVE | RAI_NUMERICHOST }, *here;
	struct rdma_cm_id *id;

	NEED(rdma_getaddrinfo("127.0.0.1", "0", &hints, &here) == 0);
	NEED(rdma_create_ep(&id, here, pd, attr) == 0 && rdma_listen(id, 4) == 0);
	snprintf(port, sizeof(port), "%d", ntohs(rdma_get_src_port(id)));
	rdma_freeaddrinfo(here);
	return id;
}

/* Creates an active endpoint. `connect_data` is private data in the address information. */
static struct rdma_cm_id *create_caller(const void *connect_data, size_t length)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = RAI_NUMERICHOST }, *there;
	struct ibv_qp_init_attr attr = attributes();
	struct rdma_cm_id *id;

	NEED(rdma_getaddrinfo("127.0.0.1", port, &hints, &there) == 0);
	if (connect_data) {
		NEED((there->ai_connect = malloc(length)));
		memcpy(there->ai_connect, connect_data, length);
		there->ai_connect_len = length;
	}
	NEED(rdma_create_ep(&id, there, NULL, &attr) == 0);
	/* The reported sizes are at least the requested sizes. */
	CHECK(attr.cap.max_inline_data > 1 && attr.cap.max_send_wr >= 3 && attr.cap.max_recv_wr >= 3);
	CHECK(attr.send_cq == id->send_cq && attr.recv_cq == id->recv_cq &&
		id->qp->send_cq == id->send_cq);
	rdma_freeaddrinfo(there);
	return id;
}

struct call {
	const void *connect_data;
	size_t length;
	struct rdma_conn_param *param;
	int result, error;
};

/* The queue pair of a rejected caller is in ERR, and its receive is flushed. */
static void expect_flushed(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct ibv_wc wc;

	CODE(0, ibv_query_qp(id->qp, &attr, IBV_QP_STATE, &init));
	NEED(attr.qp_state == IBV_QPS_ERR);
	CODE(1, rdma_get_recv_comp(id, &wc));
	CODE(IBV_WC_WR_FLUSH_ERR, (int)wc.status);
}

static void *connect_to(void *arg)
{
	struct call *call = arg;
	struct rdma_cm_id *id = create_caller(call->connect_data, call->length);
	static char inbox[8];
	struct ibv_mr *mr = rdma_reg_msgs(id, inbox, sizeof(inbox));

	NEED(mr);
	CODE(0, rdma_post_recv(id, NULL, inbox, sizeof(inbox), mr));
	errno = 0;
	call->result = rdma_connect(id, call->param);
	call->error = errno;
	if (call->result == 0) {
		CODE(RDMA_CM_EVENT_ESTABLISHED, (int)id->event->event);
		CHECK(id->event->param.conn.private_data_len >= DATA_LEN);
		CHECK(!memcmp(id->event->param.conn.private_data, data, DATA_LEN));
		CODE(0, rdma_disconnect(id));
	} else {
		expect_flushed(id);
	}
	CODE(0, rdma_dereg_mr(mr));
	rdma_destroy_ep(id);
	return NULL;
}

static pthread_t start(struct call *call)
{
	pthread_t thread;

	NEED(pthread_create(&thread, NULL, connect_to, call) == 0);
	return thread;
}

/* Each end gets the private data and the parameters of the other end. The queue pair has the
 * protection domain of the program. The caller passes private data in the address information or to
 * rdma_connect, which takes precedence. */
static void test_parameters(struct ibv_pd *pd, const void *hint, size_t length, int use_param)
{
	struct rdma_conn_param ask = { .private_data = use_param ? data : NULL, .private_data_len =
		use_param
		? DATA_LEN : 0,
		.responder_resources = 3, .initiator_depth = 5 }, answer = { .private_data = data,
		.private_data_len = DATA_LEN, .responder_resources = 5, .initiator_depth = 3 };
	struct ibv_qp_init_attr attr = attributes();
	struct rdma_cm_id *listening = create_listener(pd, &attr), *id;
	struct call call = { hint, length, &ask, -1, 0 };
	struct rdma_conn_param *reported;
	pthread_t thread = start(&call);

	NEED(rdma_get_request(listening, &id) == 0 && id->event);
	reported = &id->event->param.conn;
	CHECK(reported->private_data_len >= DATA_LEN);
	CHECK(!memcmp(reported->private_data, data, DATA_LEN));
	CODE(5, reported->responder_resources);
	CODE(3, reported->initiator_depth);
	CHECK(id->qp && id->qp->pd == pd && id->pd == pd);
	CODE(EBUSY, ibv_dealloc_pd(pd));
	CODE(0, rdma_accept(id, &answer));
	NEED(pthread_join(thread, NULL) == 0);
	CODE(0, call.result);
	rdma_destroy_ep(id);
	rdma_destroy_ep(listening);
}

static void test_rejection(void)
{
	struct rdma_cm_id *listening = create_listener(NULL, NULL), *id;
	struct call call = { NULL, 0, NULL, 0, 0 };
	pthread_t thread = start(&call);

	NEED(rdma_get_request(listening, &id) == 0);
	CODE(0, rdma_reject(id, "no", 2));
	rdma_destroy_ep(id);
	NEED(pthread_join(thread, NULL) == 0);
	CODE(-1, call.result);
	CODE(ECONNREFUSED, call.error);
	rdma_destroy_ep(listening);
}

/* If no queue pair can be created for a request, the request is rejected. */
static void test_failed_queue_pair(void)
{
	struct ibv_qp_init_attr attr = attributes();
	struct rdma_cm_id *listening, *id;
	struct call call = { NULL, 0, NULL, 0, 0 };
	pthread_t thread;

	attr.cap.max_send_wr = 1 << 30;
	listening = create_listener(NULL, &attr);
	thread = start(&call);
	MINUS_ONE(EINVAL, rdma_get_request(listening, &id));
	NEED(pthread_join(thread, NULL) == 0);
	CODE(-1, call.result);
	rdma_destroy_ep(listening);
}

/* A completion queue that is created for a shared receive queue has room for all its receives. */
static void test_created_queues(void)
{
	struct rdma_cm_id *listening = create_listener(NULL, NULL), *id;
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = RAI_NUMERICHOST }, *there;
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 500, .max_sge = 1 } };
	struct ibv_qp_init_attr attr = attributes();

	NEED(rdma_getaddrinfo("127.0.0.1", port, &hints, &there) == 0);
	NEED(rdma_create_ep(&id, there, NULL, NULL) == 0);
	rdma_freeaddrinfo(there);
	CODE(0, rdma_create_srq(id, NULL, &srq));
	CODE(0, rdma_create_qp(id, NULL, &attr));
	CHECK(id->recv_cq->cqe >= 500 && id->send_cq->cqe >= 3 && id->qp->srq == id->srq);
	rdma_destroy_ep(id);
	rdma_destroy_ep(listening);
}

int main(void)
{
	struct ibv_context **devices = rdma_get_devices(NULL), *loopback;
	struct ibv_pd *pd;
	int i;

	for (i = 0; i < DATA_LEN; i++)
		data[i] = (unsigned char)(i + 1);
	NEED(devices && (loopback = devices[0]) && (pd = ibv_alloc_pd(loopback)));
	test_parameters(pd, data, DATA_LEN, 0);
	test_parameters(pd, NULL, 0, 1);
	test_parameters(pd, "other", 5, 1);
	test_rejection();
	test_failed_queue_pair();
	test_created_queues();
	CODE(0, ibv_dealloc_pd(pd));
	rdma_free_devices(devices);
	return result();
}
