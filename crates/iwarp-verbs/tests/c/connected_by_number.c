/* Tests of queue pairs connected by address and number: with each other and with themselves, by GID
 * and by LID; with absent peers, and with receives that are not posted. */
#include "check.h"

#include <endian.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#define SIZE (1 << 21)
#define HALF (SIZE / 2)

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static char *memory;
static union ibv_gid gid;
static uint16_t lid;

struct end {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};

struct parameters {
	int by_lid;
	uint16_t lid;
	int timeout, retry_cnt, rnr_retry, min_rnr_timer;
};

static const struct parameters defaults = { .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
	.min_rnr_timer = 12 };

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void move_to_init(struct end *e)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
			IBV_ACCESS_REMOTE_ATOMIC };

	CODE(0, ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		IBV_QP_ACCESS_FLAGS));
}

static struct end create_end(void)
{
	struct end e = { .cq = ibv_create_cq(context, 256, NULL, NULL, 0) };
	struct ibv_qp_init_attr i = { .send_cq = e.cq, .recv_cq = e.cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 64, .max_recv_wr = 64, .max_send_sge = 1, .max_recv_sge = 1 } };

	NEED(e.cq);
	e.qp = ibv_create_qp(pd, &i);
	NEED(e.qp);
	move_to_init(&e);
	return e;
}

static void destroy_end(struct end *e)
{
	CODE(0, ibv_destroy_qp(e->qp));
	CODE(0, ibv_destroy_cq(e->cq));
}

static int to_rtr(struct end *e, uint32_t peer, const struct parameters *w)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer,
		.max_dest_rd_atomic = 4, .min_rnr_timer = w->min_rnr_timer, .ah_attr = { .port_num = 1 } };

	if (w->by_lid) {
		a.ah_attr.dlid = w->lid;
	} else {
		a.ah_attr.is_global = 1;
		a.ah_attr.grh.dgid = gid;
		a.ah_attr.grh.hop_limit = 1;
	}
	return ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
		IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

static int to_rts(struct end *e, const struct parameters *w)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTS, .timeout = w->timeout, .retry_cnt = w->retry_cnt,
		.rnr_retry = w->rnr_retry, .max_rd_atomic = 4 };

	return ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
		IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

static void move_to_rts(struct end *e, uint32_t peer, const struct parameters *w)
{
	CODE(0, to_rtr(e, peer, w));
	CODE(0, to_rts(e, w));
}

static void receive(struct end *e, uint64_t id, size_t off, uint32_t len)
{
	struct ibv_sge sge = { (uintptr_t)memory + off, len, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

	CODE(0, ibv_post_recv(e->qp, &wr, &bad));
}

/* Posts a request from `off` to `to` of the same memory. */
static void post(struct end *e, uint64_t id, enum ibv_wr_opcode op, size_t off, size_t to,
	uint32_t len)
{
	struct ibv_sge sge = { (uintptr_t)memory + off, len, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = op,
		.send_flags = IBV_SEND_SIGNALED, .imm_data = htobe32(0x1234) }, *bad;

	if (op == IBV_WR_ATOMIC_FETCH_AND_ADD || op == IBV_WR_ATOMIC_CMP_AND_SWP) {
		wr.wr.atomic.remote_addr = (uintptr_t)memory + to;
		wr.wr.atomic.rkey = mr->rkey;
		wr.wr.atomic.compare_add = 5;
		wr.wr.atomic.swap = 99;
	} else {
		wr.wr.rdma.remote_addr = (uintptr_t)memory + to;
		wr.wr.rdma.rkey = mr->rkey;
	}
	CODE(0, ibv_post_send(e->qp, &wr, &bad));
}

/* Waits for a completion. Returns 0 if there is none after `seconds`. */
static int poll_within(struct end *e, struct ibv_wc *wc, double seconds)
{
	double end = now() + seconds;

	do {
		if (ibv_poll_cq(e->cq, 1, wc) == 1)
			return 1;
		usleep(500);
	} while (now() < end);
	return 0;
}

static void expect_completion(struct end *e, uint64_t id, enum ibv_wc_status status)
{
	struct ibv_wc wc = { .wr_id = -1 };

	CHECK(poll_within(e, &wc, 20));
	CODE((int)id, (int)wc.wr_id);
	CODE((int)status, (int)wc.status);
}

/* Expects two completions, in any order if they are in the same queue. */
static void expect_both(struct end *a, uint64_t x, struct end *b, uint64_t y)
{
	if (a != b) {
		expect_completion(a, x, IBV_WC_SUCCESS);
		expect_completion(b, y, IBV_WC_SUCCESS);
		return;
	}
	struct ibv_wc wc[2] = { { .wr_id = -1 }, { .wr_id = -1 } };

	CHECK(poll_within(a, &wc[0], 20) && poll_within(a, &wc[1], 20));
	CHECK((wc[0].wr_id == x && wc[1].wr_id == y) || (wc[0].wr_id == y && wc[1].wr_id == x));
	CHECK(wc[0].status == IBV_WC_SUCCESS && wc[1].status == IBV_WC_SUCCESS);
}

static enum ibv_qp_state state(struct end *e)
{
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr i;

	CODE(0, ibv_query_qp(e->qp, &a, IBV_QP_STATE, &i));
	return a.qp_state;
}

/* Checks every operation between two ends, or from an end to itself. The messages have one segment
 * or many. */
static void check_all_operations(struct end *a, struct end *b)
{
	for (uint32_t len = 8; len <= HALF; len *= 512) {
		memset(memory, 0, SIZE);
		memset(memory, 'x', len);
		receive(b, 1, HALF, len);
		post(a, 2, IBV_WR_SEND, 0, 0, len);
		expect_both(a, 2, b, 1);
		CHECK(!memcmp(memory, memory + HALF, len));

		memset(memory, 'y', len);
		receive(b, 3, HALF, len);
		post(a, 4, IBV_WR_SEND_WITH_IMM, 0, 0, len);
		expect_both(a, 4, b, 3);
		CHECK(!memcmp(memory, memory + HALF, len));

		memset(memory, 'z', len);
		post(a, 5, IBV_WR_RDMA_WRITE, 0, HALF, len);
		expect_completion(a, 5, IBV_WC_SUCCESS);
		CHECK(!memcmp(memory, memory + HALF, len));

		memset(memory, 'u', len);
		receive(b, 6, HALF, 0);
		post(a, 7, IBV_WR_RDMA_WRITE_WITH_IMM, 0, HALF, len);
		expect_both(a, 7, b, 6);
		CHECK(!memcmp(memory, memory + HALF, len));

		memset(memory + HALF, 'v', len);
		post(a, 8, IBV_WR_RDMA_READ, 0, HALF, len);
		expect_completion(a, 8, IBV_WC_SUCCESS);
		CHECK(!memcmp(memory, memory + HALF, len));
	}
	uint64_t *word = (uint64_t *)(memory + HALF), *old = (uint64_t *)memory;

	*word = 0;
	post(a, 9, IBV_WR_ATOMIC_FETCH_AND_ADD, 0, HALF, 8);
	expect_completion(a, 9, IBV_WC_SUCCESS);
	CHECK(*old == 0 && *word == 5);
	post(a, 10, IBV_WR_ATOMIC_CMP_AND_SWP, 0, HALF, 8);
	expect_completion(a, 10, IBV_WC_SUCCESS);
	CHECK(*old == 5 && *word == 99);
	/* Many requests of all kinds are in flight at the same time. */
	for (int i = 0; i < 16; i++) {
		post(a, 100 + 3 * i, IBV_WR_RDMA_WRITE, 0, HALF, 40000);
		post(a, 101 + 3 * i, IBV_WR_RDMA_READ, 0, HALF, 40000);
		post(a, 102 + 3 * i, IBV_WR_ATOMIC_FETCH_AND_ADD, 0, HALF, 8);
	}
	for (int i = 0; i < 48; i++)
		expect_completion(a, 100 + i, IBV_WC_SUCCESS);
}

/* A request that the peer refuses completes with the peer's reason. Earlier requests succeed, and
 * later requests are flushed. */
static void check_refused_write(struct end *a)
{
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED }, *bad;

	wr.wr.rdma.remote_addr = (uintptr_t)memory;
	wr.wr.rdma.rkey = mr->rkey ^ 0x100;
	post(a, 1, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	CODE(0, ibv_post_send(a->qp, &wr, &bad));
	post(a, 3, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	expect_completion(a, 1, IBV_WC_SUCCESS);
	expect_completion(a, 2, IBV_WC_REM_ACCESS_ERR);
	expect_completion(a, 3, IBV_WC_WR_FLUSH_ERR);
	CHECK(state(a) == IBV_QPS_ERR);
}

static void check_refused_read(struct end *a)
{
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
		.send_flags = IBV_SEND_SIGNALED }, *bad;

	wr.wr.rdma.remote_addr = (uintptr_t)memory;
	wr.wr.rdma.rkey = mr->rkey ^ 0x100;
	post(a, 1, IBV_WR_RDMA_READ, 0, HALF, 8);
	expect_completion(a, 1, IBV_WC_SUCCESS);
	CODE(0, ibv_post_send(a->qp, &wr, &bad));
	expect_completion(a, 2, IBV_WC_REM_ACCESS_ERR);
	CHECK(state(a) == IBV_QPS_ERR);
}

static void reset(struct end *e)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RESET };

	CODE(0, ibv_modify_qp(e->qp, &a, IBV_QP_STATE));
	move_to_init(e);
}

static void test_self_connection(const struct parameters *w)
{
	struct end e = create_end();

	move_to_rts(&e, e.qp->qp_num, w);
	CHECK(state(&e) == IBV_QPS_RTS);
	check_all_operations(&e, &e);
	reset(&e);
	move_to_rts(&e, e.qp->qp_num, w);
	check_all_operations(&e, &e);
	check_refused_write(&e);
	reset(&e);
	move_to_rts(&e, e.qp->qp_num, w);
	check_refused_read(&e);
	reset(&e);
	/* The receive is posted late, but before the Send times out. */
	move_to_rts(&e, e.qp->qp_num, w);
	post(&e, 1, IBV_WR_SEND, 0, 0, 8);
	struct ibv_wc wc;
	CHECK(!poll_within(&e, &wc, 0.3));
	receive(&e, 2, HALF, 8);
	expect_both(&e, 1, &e, 2);
	/* Destroy the queue pair while requests of all kinds are outstanding. */
	for (int i = 0; i < 8; i++) {
		post(&e, 1, IBV_WR_RDMA_READ, 0, HALF, HALF);
		post(&e, 2, IBV_WR_SEND, 0, 0, HALF);
	}
	destroy_end(&e);
}

/* The connecting end moves to RTR, and with `both` the accepting end, too. After `delay` they are
 * reset and connected again. Connection requests from before the reset must have no effect,
 * whichever end is reset first. */
static void test_reset_after(useconds_t delay, int both, int accepting_first,
	void (*use)(struct end *, struct end *))
{
	struct end a = create_end(), b = create_end();
	struct end *first = a.qp->qp_num < b.qp->qp_num ? &a : &b, *second = first == &a ? &b : &a;

	CODE(0, to_rtr(first, second->qp->qp_num, &defaults));
	if (both)
		CODE(0, to_rtr(second, first->qp->qp_num, &defaults));
	/* Do not call usleep(0): it would yield the processor. */
	if (delay)
		usleep(delay);
	if (both && accepting_first)
		reset(second);
	reset(first);
	if (both && !accepting_first)
		reset(second);
	move_to_rts(second, first->qp->qp_num, &defaults);
	CHECK(state(first) == IBV_QPS_INIT);
	move_to_rts(first, second->qp->qp_num, &defaults);
	use(first, second);
	use(second, first);
	CHECK(state(first) == IBV_QPS_RTS && state(second) == IBV_QPS_RTS);
	destroy_end(&a);
	destroy_end(&b);
}

static void one_write(struct end *a, struct end *b)
{
	(void)b;
	post(a, 1, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	expect_completion(a, 1, IBV_WC_SUCCESS);
}

/* Resets at various times between the connection request and its reply. */
static void test_reset_while_connecting(void)
{
	static const useconds_t delays[] = { 0, 20, 50, 100, 200, 500, 1000, 5000, 20000 };

	for (unsigned i = 0; i < sizeof(delays) / sizeof(*delays); i++) {
		test_reset_after(delays[i], 0, 0, check_all_operations);
		test_reset_after(delays[i], 1, 0, check_all_operations);
		test_reset_after(delays[i], 1, 1, check_all_operations);
	}
	/* Repeat often, because the connecting thread is rarely preempted at a given step. */
	for (int i = 0; i < 400; i++)
		test_reset_after(i / 2 % 10 * 8 + 1, 1, i % 2, one_write);
}

/* Connects two queue pairs of this process. First the queue pair with the smaller number moves to
 * RTR first, then that with the larger number. */
static void test_two_ends(const struct parameters *w)
{
	for (int order = 0; order < 2; order++) {
		struct end a = create_end(), b = create_end();
		int a_first = (a.qp->qp_num < b.qp->qp_num) ^ order;
		struct end *first = a_first ? &a : &b, *second = a_first ? &b : &a;

		move_to_rts(first, second->qp->qp_num, w);
		usleep(20000);
		move_to_rts(second, first->qp->qp_num, w);
		check_all_operations(first, second);
		check_all_operations(second, first);
		check_refused_write(first);
		destroy_end(&a);
		destroy_end(&b);
	}
}

static void test_invalid_attributes(void)
{
	struct end e = create_end();
	union ibv_gid own = gid;
	struct parameters w = defaults;
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = 17,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .sgid_index = 31 } } };
	int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;

	CODE(EINVAL, ibv_modify_qp(e.qp, &a, mask));
	a.ah_attr.grh.sgid_index = 200;
	CODE(EINVAL, ibv_modify_qp(e.qp, &a, mask));
	CHECK(state(&e) == IBV_QPS_INIT);
	memset(&gid, 0, sizeof(gid));
	CODE(EINVAL, to_rtr(&e, 17, &w));
	gid = own;
	CHECK(state(&e) == IBV_QPS_INIT);
	CODE(0, to_rtr(&e, e.qp->qp_num, &defaults));
	w = defaults;
	w.timeout = 32;
	CODE(EINVAL, to_rts(&e, &w));
	w = defaults;
	w.rnr_retry = 8;
	CODE(EINVAL, to_rts(&e, &w));
	w = defaults;
	w.retry_cnt = 8;
	CODE(EINVAL, to_rts(&e, &w));
	CHECK(state(&e) == IBV_QPS_RTR);
	CODE(0, to_rts(&e, &defaults));
	destroy_end(&e);
}

/* A request to an absent peer fails after the time given by `timeout` and `retry_cnt`. */
static void test_absent_peer(uint32_t peer, int receives_too)
{
	struct end e = create_end();
	struct parameters w = defaults;
	struct ibv_wc wc;
	double start;

	/* The timeout is 0.27 s, and there are 8 attempts. */
	w.timeout = 16;
	move_to_rts(&e, peer, &w);
	if (receives_too)
		receive(&e, 9, HALF, 8);
	CHECK(!poll_within(&e, &wc, 2.5));
	start = now();
	post(&e, 1, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	post(&e, 2, IBV_WR_SEND, 0, HALF, 8);
	expect_completion(&e, 1, IBV_WC_RETRY_EXC_ERR);
	CHECK(now() - start > 2.1);
	CHECK(now() - start < 10);
	expect_completion(&e, 2, IBV_WC_WR_FLUSH_ERR);
	if (receives_too)
		expect_completion(&e, 9, IBV_WC_WR_FLUSH_ERR);
	CHECK(state(&e) == IBV_QPS_ERR);
	reset(&e);
	move_to_rts(&e, e.qp->qp_num, &defaults);
	check_all_operations(&e, &e);
	destroy_end(&e);
}

/* With a `timeout` of zero, a request waits for its peer forever. */
static void test_infinite_timeout(void)
{
	struct end a = create_end(), b = create_end();
	struct parameters w = defaults;
	struct ibv_wc wc;

	w.timeout = 0;
	move_to_rts(&a, b.qp->qp_num, &w);
	post(&a, 1, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	CHECK(!poll_within(&a, &wc, 2.5));
	move_to_rts(&b, a.qp->qp_num, &w);
	expect_completion(&a, 1, IBV_WC_SUCCESS);
	destroy_end(&a);
	destroy_end(&b);
}

/* After the peer is destroyed, earlier requests have succeeded, and later requests fail. */
static void test_destroyed_peer(void)
{
	struct end a = create_end(), b = create_end();
	struct ibv_wc wc;

	move_to_rts(&a, b.qp->qp_num, &defaults);
	move_to_rts(&b, a.qp->qp_num, &defaults);
	receive(&a, 3, HALF, 8);
	post(&a, 1, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	expect_completion(&a, 1, IBV_WC_SUCCESS);
	destroy_end(&b);
	CHECK(!poll_within(&a, &wc, 0.5));
	CHECK(state(&a) == IBV_QPS_RTS);
	post(&a, 2, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	expect_completion(&a, 2, IBV_WC_RETRY_EXC_ERR);
	expect_completion(&a, 3, IBV_WC_WR_FLUSH_ERR);
	destroy_end(&a);
}

/* If no receive is posted, `rnr_retry` and the receiver's `min_rnr_timer` limit the time that a
 * Send waits. */
static void check_receiver_not_ready(struct end *a, struct end *b, int rnr_retry,
	int min_rnr_timer, double least)
{
	struct parameters w = defaults;
	struct ibv_wc wc;
	double start;

	w.rnr_retry = rnr_retry;
	w.min_rnr_timer = min_rnr_timer;
	move_to_rts(a, b->qp->qp_num, &w);
	if (a != b)
		move_to_rts(b, a->qp->qp_num, &w);
	receive(b, 8, HALF, 8);
	post(a, 9, IBV_WR_SEND, 0, 0, 8);
	expect_both(a, 9, b, 8);
	start = now();
	post(a, 1, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	post(a, 2, IBV_WR_SEND, 0, 0, 8);
	post(a, 3, IBV_WR_SEND, 0, 0, 8);
	expect_completion(a, 1, IBV_WC_SUCCESS);
	if (rnr_retry == 7) {
		CHECK(!poll_within(a, &wc, least));
		receive(b, 4, HALF, 8);
		expect_both(a, 2, b, 4);
		receive(b, 5, HALF, 8);
		expect_both(a, 3, b, 5);
	} else {
		expect_completion(a, 2, IBV_WC_RNR_RETRY_EXC_ERR);
		CHECK(now() - start > least);
		CHECK(now() - start < least + 5);
		expect_completion(a, 3, IBV_WC_WR_FLUSH_ERR);
	}
}

static void test_receiver_not_ready(void)
{
	/* Codes 1 and 31 are 10 µs and 491 ms. */
	static const struct { int rnr_retry, min_rnr_timer; double least; } rows[] = {
		{ 0, 31, 0 }, { 3, 31, 1.4 }, { 6, 1, 0 }, { 7, 1, 2.5 },
	};

	for (unsigned i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
		struct end a = create_end(), b = create_end(), self = create_end();

		check_receiver_not_ready(&a, &b, rows[i].rnr_retry, rows[i].min_rnr_timer, rows[i].least);
		check_receiver_not_ready(&self, &self, rows[i].rnr_retry, rows[i].min_rnr_timer, rows[i].least);
		destroy_end(&a);
		destroy_end(&b);
		destroy_end(&self);
	}
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_port_attr port;

	NEED(list && list[0]);
	context = ibv_open_device(list[0]);
	NEED(context);
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(context);
	NEED(pd);
	memory = aligned_alloc(4096, SIZE);
	NEED(memory);
	mr = ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
		IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
	NEED(mr);
	CODE(0, ibv_query_gid(context, 1, 0, &gid));
	CODE(0, ibv_query_port(context, 1, &port));
	lid = port.lid;
	CHECK(lid == (gid.raw[14] << 8 | gid.raw[15]));

	struct parameters by_lid = defaults, by_none = defaults;

	by_lid.by_lid = by_none.by_lid = 1;
	by_lid.lid = lid;
	test_self_connection(&defaults);
	test_self_connection(&by_lid);
	test_two_ends(&defaults);
	test_reset_while_connecting();
	test_two_ends(&by_lid);
	test_two_ends(&by_none);
	test_invalid_attributes();
	/* The peer's number is below or above the local number, so this end takes each role. Nothing
	 * listens on port 9 of the loopback address. */
	test_absent_peer(9, 1);
	test_absent_peer(0xff0009, 0);
	test_infinite_timeout();
	test_destroyed_peer();
	test_receiver_not_ready();
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	return result();
}
