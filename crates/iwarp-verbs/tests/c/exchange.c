/* An exchange as in rping, with both ends in one process. It uses every operation. It destroys
 * every object, so that a memory checker reports only leaks of the library. */
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <sys/socket.h>

#include "check.h"

enum { SIZE = 60000, ROUNDS = 20, BATCH = 8 };

struct end {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_comp_channel *completions;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_mr *mr;
	struct ibv_mw *mw;
	char *buffer;
};

/* Address and key of the passive end's buffer, sent in its private data. */
struct target {
	uint64_t addr;
	uint64_t rkey;
};

static int port;
static pthread_barrier_t ready;

static struct rdma_cm_event *next_event(struct end *e, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event = NULL;

	NEED(rdma_get_cm_event(e->channel, &event) == 0);
	CODE((int)type, (int)event->event);
	return event;
}

static void acknowledge(struct rdma_cm_event *event)
{
	CODE(0, rdma_ack_cm_event(event));
}

static void create_objects(struct end *e, int shared)
{
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 64, .max_recv_wr = 64, .max_send_sge = 4, .max_recv_sge = 2,
			 .max_inline_data = 64 },
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_srq_init_attr srq_attr = { .attr = { .max_wr = 64, .max_sge = 2 } };

	e->pd = ibv_alloc_pd(e->id->verbs);
	e->completions = ibv_create_comp_channel(e->id->verbs);
	e->cq = ibv_create_cq(e->id->verbs, 256, e, e->completions, 0);
	NEED(e->pd && e->completions && e->cq);
	if (shared) {
		e->srq = ibv_create_srq(e->pd, &srq_attr);
		NEED(e->srq);
		attr.srq = e->srq;
	}
	attr.send_cq = attr.recv_cq = e->cq;
	if (shared) {
		NEED(rdma_create_qp(e->id, e->pd, &attr) == 0);
	} else {
		struct ibv_qp_init_attr_ex extended = {
			.send_cq = e->cq,
			.recv_cq = e->cq,
			.cap = attr.cap,
			.qp_type = IBV_QPT_RC,
			.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
			.pd = e->pd,
			.send_ops_flags = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV,
		};
		NEED(rdma_create_qp_ex(e->id, &extended) == 0);
	}
	e->buffer = calloc(1, SIZE);
	NEED(e->buffer);
	e->mr = ibv_reg_mr(e->pd, e->buffer, SIZE,
			   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
				   IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND);
	e->mw = ibv_alloc_mw(e->pd, IBV_MW_TYPE_2);
	NEED(e->mr && e->mw);
}

static void destroy_objects(struct end *e)
{
	rdma_destroy_qp(e->id);
	CODE(0, ibv_dealloc_mw(e->mw));
	CODE(0, ibv_dereg_mr(e->mr));
	free(e->buffer);
	if (e->srq)
		CODE(0, ibv_destroy_srq(e->srq));
	CODE(0, ibv_destroy_cq(e->cq));
	CODE(0, ibv_destroy_comp_channel(e->completions));
	CODE(0, ibv_dealloc_pd(e->pd));
	CODE(0, rdma_destroy_id(e->id));
}

/* Returns the next completion, which must be successful. Waits for an event if there is none. */
static struct ibv_wc wait_for_completion(struct end *e)
{
	struct ibv_wc wc;
	struct ibv_cq *cq;
	void *own;

	for (;;) {
		int n = ibv_poll_cq(e->cq, 1, &wc);

		NEED(n >= 0);
		if (n)
			break;
		NEED(ibv_req_notify_cq(e->cq, 0) == 0);
		n = ibv_poll_cq(e->cq, 1, &wc);
		NEED(n >= 0);
		if (n)
			break;
		NEED(ibv_get_cq_event(e->completions, &cq, &own) == 0);
		CHECK(cq == e->cq && own == e);
		ibv_ack_cq_events(cq, 1);
	}
	CODE(IBV_WC_SUCCESS, wc.status);
	return wc;
}

static void receive(struct end *e, uint64_t id, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)e->buffer, length, e->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

	if (e->srq)
		NEED(ibv_post_srq_recv(e->srq, &wr, &bad) == 0);
	else
		NEED(ibv_post_recv(e->id->qp, &wr, &bad) == 0);
}

static void post(struct end *e, struct ibv_send_wr wr, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)e->buffer, length, e->mr->lkey };
	struct ibv_send_wr *bad;

	wr.sg_list = &sge;
	wr.num_sge = 1;
	wr.send_flags |= IBV_SEND_SIGNALED;
	NEED(ibv_post_send(e->id->qp, &wr, &bad) == 0);
}

static void fill(struct end *e, int round)
{
	int i;

	for (i = 0; i < SIZE; i++)
		e->buffer[i] = (char)(i * 7 + round);
}

static int is_filled(const struct end *e, int round, int length)
{
	int i;

	for (i = 0; i < length; i++)
		if (e->buffer[i] != (char)(i * 7 + round))
			return 0;
	return 1;
}

static void listen_on(struct end *e)
{
	struct sockaddr_in addr = { .sin_family = AF_INET };

	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	e->channel = rdma_create_event_channel();
	NEED(e->channel && rdma_create_id(e->channel, &e->id, e, RDMA_PS_TCP) == 0);
	NEED(rdma_bind_addr(e->id, (struct sockaddr *)&addr) == 0 && rdma_listen(e->id, 4) == 0);
	port = ntohs(rdma_get_src_port(e->id));
}

/* The passive end: replies to a Send in each round, and returns when the active end disconnects. */
static void *run_server(void *unused)
{
	struct end listener = { 0 }, e = { 0 };
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4 };
	struct rdma_cm_event *event;
	struct target target;
	int round, i;

	(void)unused;
	listen_on(&listener);
	pthread_barrier_wait(&ready);
	event = next_event(&listener, RDMA_CM_EVENT_CONNECT_REQUEST);
	e.id = event->id;
	e.channel = listener.channel;
	acknowledge(event);
	create_objects(&e, 1);
	for (i = 0; i < BATCH; i++)
		receive(&e, i, SIZE);
	target = (struct target){ (uintptr_t)e.buffer, e.mr->rkey };
	param.private_data = &target;
	param.private_data_len = sizeof(target);
	NEED(rdma_accept(e.id, &param) == 0);
	acknowledge(next_event(&listener, RDMA_CM_EVENT_ESTABLISHED));
	for (round = 0; round < ROUNDS; round++) {
		struct ibv_wc wc = wait_for_completion(&e);

		CHECK(wc.opcode == IBV_WC_RECV && wc.byte_len == SIZE && is_filled(&e, round, SIZE));
		receive(&e, wc.wr_id, SIZE);
		post(&e, (struct ibv_send_wr){ .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htonl(round) }, SIZE);
		wait_for_completion(&e);
		wc = wait_for_completion(&e);
		CHECK(wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && ntohl(wc.imm_data) == (uint32_t)round);
		receive(&e, wc.wr_id, SIZE);
	}
	acknowledge(next_event(&listener, RDMA_CM_EVENT_DISCONNECTED));
	destroy_objects(&e);
	CODE(0, rdma_destroy_id(listener.id));
	rdma_destroy_event_channel(listener.channel);
	return NULL;
}

static struct target connect_to(struct end *e)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(port) };
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4 };
	struct rdma_cm_event *event;
	struct target target;

	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	e->channel = rdma_create_event_channel();
	NEED(e->channel && rdma_create_id(e->channel, &e->id, e, RDMA_PS_TCP) == 0);
	NEED(rdma_resolve_addr(e->id, NULL, (struct sockaddr *)&addr, 1000) == 0);
	acknowledge(next_event(e, RDMA_CM_EVENT_ADDR_RESOLVED));
	NEED(rdma_resolve_route(e->id, 1000) == 0);
	acknowledge(next_event(e, RDMA_CM_EVENT_ROUTE_RESOLVED));
	create_objects(e, 0);
	receive(e, 1, SIZE);
	NEED(rdma_connect(e->id, &param) == 0);
	event = next_event(e, RDMA_CM_EVENT_ESTABLISHED);
	NEED(event->param.conn.private_data_len >= sizeof(target));
	memcpy(&target, event->param.conn.private_data, sizeof(target));
	acknowledge(event);
	return target;
}

static void test_bind_and_invalidate(struct end *e)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED }, *bad;

	wr.bind_mw.mw = e->mw;
	wr.bind_mw.rkey = ibv_inc_rkey(e->mw->rkey);
	wr.bind_mw.bind_info = (struct ibv_mw_bind_info){ e->mr, (uintptr_t)e->buffer, 64,
		IBV_ACCESS_REMOTE_READ };
	NEED(ibv_post_send(e->id->qp, &wr, &bad) == 0);
	wait_for_completion(e);
	e->mw->rkey = wr.bind_mw.rkey;
	CODE(EBUSY, ibv_dereg_mr(e->mr));
	wr = (struct ibv_send_wr){ .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED };
	wr.invalidate_rkey = e->mw->rkey;
	NEED(ibv_post_send(e->id->qp, &wr, &bad) == 0);
	wait_for_completion(e);
}

/* Binds and invalidates a memory window three times in one batch, and three times in one list. */
static void test_repeated_bind(struct end *e)
{
	struct ibv_mw_bind_info info = { e->mr, (uintptr_t)e->buffer, 64, IBV_ACCESS_REMOTE_READ };
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(e->id->qp);
	struct ibv_send_wr list[6] = { 0 }, *bad;
	uint32_t key = e->mw->rkey;
	int i;

	NEED(qp);
	ibv_wr_start(qp);
	qp->wr_flags = IBV_SEND_SIGNALED;
	for (i = 0; i < 3; i++) {
		key = ibv_inc_rkey(key);
		ibv_wr_bind_mw(qp, e->mw, key, &info);
		ibv_wr_local_inv(qp, key);
	}
	CODE(0, ibv_wr_complete(qp));
	for (i = 0; i < 6; i++)
		wait_for_completion(e);
	for (i = 0; i < 6; i++) {
		list[i].send_flags = IBV_SEND_SIGNALED;
		list[i].next = i < 5 ? &list[i + 1] : NULL;
		if (i % 2) {
			list[i].opcode = IBV_WR_LOCAL_INV;
			list[i].invalidate_rkey = key;
			continue;
		}
		key = ibv_inc_rkey(key);
		list[i].opcode = IBV_WR_BIND_MW;
		list[i].bind_mw.mw = e->mw;
		list[i].bind_mw.rkey = key;
		list[i].bind_mw.bind_info = info;
	}
	CODE(0, ibv_post_send(e->id->qp, list, &bad));
	for (i = 0; i < 6; i++)
		wait_for_completion(e);
	e->mw->rkey = key;
}

/* Posts a list that the library cannot convert in one step. Its requests have zero to four
 * elements, and some are inline. */
static void test_long_list(struct end *e, struct target to)
{
	enum { N = 60, BACK = SIZE / 2 };
	static struct ibv_send_wr list[N];
	static struct ibv_sge elements[N][4];
	static char expected[BACK];
	struct ibv_send_wr read = { .opcode = IBV_WR_RDMA_READ }, *bad;
	struct ibv_sge back;
	uint32_t total = 0;
	int i, j;

	fill(e, 3);
	for (i = 0; i < N; i++) {
		list[i].wr_id = i;
		list[i].next = i + 1 < N ? &list[i + 1] : NULL;
		list[i].sg_list = elements[i];
		list[i].num_sge = i % 11 == 5 ? 0 : 1 + i % 4;
		list[i].opcode = IBV_WR_RDMA_WRITE;
		list[i].send_flags = i % 7 ? 0 : IBV_SEND_INLINE;
		list[i].wr.rdma.remote_addr = to.addr + total;
		list[i].wr.rdma.rkey = to.rkey;
		for (j = 0; j < list[i].num_sge; j++) {
			char *from = e->buffer + 100 * i + 20 * j;
			uint32_t length = 5 + 2 * j + i % 5;

			elements[i][j] = (struct ibv_sge){ (uintptr_t)from, length, e->mr->lkey };
			memcpy(expected + total, from, length);
			total += length;
		}
	}
	list[N - 1].send_flags |= IBV_SEND_SIGNALED;
	NEED(ibv_post_send(e->id->qp, list, &bad) == 0);
	CODE(N - 1, (int)wait_for_completion(e).wr_id);
	back = (struct ibv_sge){ (uintptr_t)e->buffer + BACK, total, e->mr->lkey };
	read.send_flags = IBV_SEND_SIGNALED;
	read.sg_list = &back;
	read.num_sge = 1;
	read.wr.rdma.remote_addr = to.addr;
	read.wr.rdma.rkey = to.rkey;
	NEED(ibv_post_send(e->id->qp, &read, &bad) == 0);
	wait_for_completion(e);
	CHECK(memcmp(e->buffer + BACK, expected, total) == 0);
}

/* A null region discards data that is read into it. A Write from it writes zeros. */
static void test_null_region(struct end *e, struct target to)
{
	struct ibv_mr *null_mr = ibv_alloc_null_mr(e->pd);
	struct ibv_sge parts[3] = { { .addr = 0, .length = 100 }, { .length = 200 },
		{ .addr = 12345, .length = SIZE - 300 } };
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_READ, .sg_list = parts, .num_sge = 3 }, *bad;

	NEED(null_mr);
	CHECK(null_mr->pd == e->pd && null_mr->length == SIZE_MAX);
	parts[0].lkey = parts[2].lkey = null_mr->lkey;
	parts[1].lkey = e->mr->lkey;
	parts[1].addr = (uintptr_t)e->buffer;
	wr.send_flags = IBV_SEND_SIGNALED;
	wr.wr.rdma.remote_addr = to.addr;
	wr.wr.rdma.rkey = to.rkey;
	fill(e, 5);
	post(e, (struct ibv_send_wr){ .opcode = IBV_WR_RDMA_WRITE, .wr = wr.wr }, SIZE);
	wait_for_completion(e);
	memset(e->buffer, 0x77, SIZE);
	NEED(ibv_post_send(e->id->qp, &wr, &bad) == 0);
	wait_for_completion(e);
	for (int i = 0; i < SIZE; i++)
		if (e->buffer[i] != (i < 200 ? (char)((i + 100) * 7 + 5) : 0x77))
			NEED(!"the Read changed another part of the buffer");
	/* Data written into the region cannot be read back. */
	wr.opcode = IBV_WR_RDMA_WRITE;
	parts[1].length = 1;
	parts[2].length = SIZE - 101;
	NEED(ibv_post_send(e->id->qp, &wr, &bad) == 0);
	wait_for_completion(e);
	wr.opcode = IBV_WR_RDMA_READ;
	post(e, wr, SIZE);
	wait_for_completion(e);
	CHECK(e->buffer[100] == (char)(100 * 7 + 5));
	e->buffer[100] = 0;
	for (int i = 0; i < SIZE; i++)
		if (e->buffer[i])
			NEED(!"the null region did not yield zeros");
	CODE(IBV_REREG_MR_ERR_INPUT, ibv_rereg_mr(null_mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0));
	CODE(0, ibv_dereg_mr(null_mr));
	CODE(EINVAL, ibv_dereg_mr(null_mr));
}

static void run_rounds(struct end *e, struct target to)
{
	int round;

	for (round = 0; round < ROUNDS; round++) {
		struct ibv_send_wr wr = { .opcode = IBV_WR_SEND };
		struct ibv_wc wc;
		int i;

		fill(e, round);
		post(e, wr, SIZE);
		/* The completions of the Send and of the echo arrive in any order. */
		for (i = 0; i < 2; i++) {
			wc = wait_for_completion(e);
			if (wc.opcode == IBV_WC_RECV) {
				CHECK(wc.wc_flags & IBV_WC_WITH_IMM && ntohl(wc.imm_data) == (uint32_t)round);
				CHECK(is_filled(e, round, SIZE));
			}
		}
		receive(e, 1, SIZE);
		wr.wr.rdma.remote_addr = to.addr;
		wr.wr.rdma.rkey = to.rkey;
		wr.opcode = IBV_WR_RDMA_READ;
		memset(e->buffer, 0, SIZE);
		post(e, wr, SIZE);
		wait_for_completion(e);
		CHECK(is_filled(e, round, SIZE));
		wr.opcode = IBV_WR_RDMA_WRITE;
		post(e, wr, SIZE / 2);
		wait_for_completion(e);
		wr.send_flags = IBV_SEND_INLINE;
		post(e, wr, 48);
		wait_for_completion(e);
		wr.send_flags = 0;
		wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
		wr.wr.atomic.remote_addr = to.addr;
		wr.wr.atomic.rkey = to.rkey;
		wr.wr.atomic.compare_add = 0;
		post(e, wr, 8);
		wait_for_completion(e);
		CHECK(is_filled(e, round, 8));
		test_bind_and_invalidate(e);
		test_repeated_bind(e);
		wr = (struct ibv_send_wr){ .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .imm_data = htonl(round) };
		wr.wr.rdma.remote_addr = to.addr;
		wr.wr.rdma.rkey = to.rkey;
		post(e, wr, 64);
		wait_for_completion(e);
	}
}

int main(void)
{
	struct end e = { 0 };
	struct target to;
	pthread_t server;

	NEED(pthread_barrier_init(&ready, NULL, 2) == 0);
	NEED(pthread_create(&server, NULL, run_server, NULL) == 0);
	pthread_barrier_wait(&ready);
	to = connect_to(&e);
	test_long_list(&e, to);
	test_null_region(&e, to);
	run_rounds(&e, to);
	CODE(0, rdma_disconnect(e.id));
	acknowledge(next_event(&e, RDMA_CM_EVENT_DISCONNECTED));
	destroy_objects(&e);
	rdma_destroy_event_channel(e.channel);
	NEED(pthread_join(server, NULL) == 0);
	return result();
}
