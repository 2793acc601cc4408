/* Queue pairs connected by address and number: with each other and with themselves, by GID and by
 * LID; absent peers, and receives that are not posted. */
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

static const struct parameters usual = { .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
	.min_rnr_timer = 12 };

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void init(struct end *e)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
			IBV_ACCESS_REMOTE_ATOMIC };

	CODE(0, ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		IBV_QP_ACCESS_FLAGS));
}

static struct end make(void)
{
	struct end e = { .cq = ibv_create_cq(context, 256, NULL, NULL, 0) };
	struct ibv_qp_init_attr i = { .send_cq = e.cq, .recv_cq = e.cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 64, .max_recv_wr = 64, .max_send_sge = 1, .max_recv_sge = 1 } };

	NEED(e.cq);
	e.qp = ibv_create_qp(pd, &i);
	NEED(e.qp);
	init(&e);
	return e;
}

static void unmake(struct end *e)
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

static void join(struct end *e, uint32_t peer, const struct parameters *w)
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
static int take(struct end *e, struct ibv_wc *wc, double seconds)
{
	double end = now() + seconds;

	do {
		if (ibv_poll_cq(e->cq, 1, wc) == 1)
			return 1;
		usleep(500);
	} while (now() < end);
	return 0;
}

static void completes(struct end *e, uint64_t id, enum ibv_wc_status status)
{
	struct ibv_wc wc = { .wr_id = -1 };

	CHECK(take(e, &wc, 20));
	CODE((int)id, (int)wc.wr_id);
	CODE((int)status, (int)wc.status);
}

/* Polls two completions that may arrive in any order. */
static void both_complete(struct end *a, uint64_t x, struct end *b, uint64_t y)
{
	if (a != b) {
		completes(a, x, IBV_WC_SUCCESS);
		completes(b, y, IBV_WC_SUCCESS);
		return;
	}
	struct ibv_wc wc[2] = { { .wr_id = -1 }, { .wr_id = -1 } };

	CHECK(take(a, &wc[0], 20) && take(a, &wc[1], 20));
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

/* Every operation between two ends, or from an end to itself, with messages of one and of many
 * segments. */
static void all_operations(struct end *a, struct end *b)
{
	for (uint32_t len = 8; len <= HALF; len *= 512) {
		memset(memory, 0, SIZE);
		memset(memory, 'x', len);
		receive(b, 1, HALF, len);
		post(a, 2, IBV_WR_SEND, 0, 0, len);
		both_complete(a, 2, b, 1);
		CHECK(!memcmp(memory, memory + HALF, len));

		memset(memory, 'y', len);
		receive(b, 3, HALF, len);
		post(a, 4, IBV_WR_SEND_WITH_IMM, 0, 0, len);
		both_complete(a, 4, b, 3);
		CHECK(!memcmp(memory, memory + HALF, len));

		memset(memory, 'z', len);
		post(a, 5, IBV_WR_RDMA_WRITE, 0, HALF, len);
		completes(a, 5, IBV_WC_SUCCESS);
		CHECK(!memcmp(memory, memory + HALF, len));

		memset(memory, 'u', len);
		receive(b, 6, HALF, 0);
		post(a, 7, IBV_WR_RDMA_WRITE_WITH_IMM, 0, HALF, len);
		both_complete(a, 7, b, 6);
		CHECK(!memcmp(memory, memory + HALF, len));

		memset(memory + HALF, 'v', len);
		post(a, 8, IBV_WR_RDMA_READ, 0, HALF, len);
		completes(a, 8, IBV_WC_SUCCESS);
		CHECK(!memcmp(memory, memory + HALF, len));
	}
	uint64_t *word = (uint64_t *)(memory + HALF), *old = (uint64_t *)memory;

	*word = 0;
	post(a, 9, IBV_WR_ATOMIC_FETCH_AND_ADD, 0, HALF, 8);
	completes(a, 9, IBV_WC_SUCCESS);
	CHECK(*old == 0 && *word == 5);
	post(a, 10, IBV_WR_ATOMIC_CMP_AND_SWP, 0, HALF, 8);
	completes(a, 10, IBV_WC_SUCCESS);
	CHECK(*old == 5 && *word == 99);
	/* Many requests of all kinds at a time. */
	for (int i = 0; i < 16; i++) {
		post(a, 100 + 3 * i, IBV_WR_RDMA_WRITE, 0, HALF, 40000);
		post(a, 101 + 3 * i, IBV_WR_RDMA_READ, 0, HALF, 40000);
		post(a, 102 + 3 * i, IBV_WR_ATOMIC_FETCH_AND_ADD, 0, HALF, 8);
	}
	for (int i = 0; i < 48; i++)
		completes(a, 100 + i, IBV_WC_SUCCESS);
}

/* A refused request gets the peer's reason, earlier ones succeed, and later ones are flushed. */
static void refusal(struct end *a)
{
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED }, *bad;

	wr.wr.rdma.remote_addr = (uintptr_t)memory;
	wr.wr.rdma.rkey = mr->rkey ^ 0x100;
	post(a, 1, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	CODE(0, ibv_post_send(a->qp, &wr, &bad));
	post(a, 3, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	completes(a, 1, IBV_WC_SUCCESS);
	completes(a, 2, IBV_WC_REM_ACCESS_ERR);
	completes(a, 3, IBV_WC_WR_FLUSH_ERR);
	CHECK(state(a) == IBV_QPS_ERR);
}

static void refused_read(struct end *a)
{
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
		.send_flags = IBV_SEND_SIGNALED }, *bad;

	wr.wr.rdma.remote_addr = (uintptr_t)memory;
	wr.wr.rdma.rkey = mr->rkey ^ 0x100;
	post(a, 1, IBV_WR_RDMA_READ, 0, HALF, 8);
	completes(a, 1, IBV_WC_SUCCESS);
	CODE(0, ibv_post_send(a->qp, &wr, &bad));
	completes(a, 2, IBV_WC_REM_ACCESS_ERR);
	CHECK(state(a) == IBV_QPS_ERR);
}

static void reset(struct end *e)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RESET };

	CODE(0, ibv_modify_qp(e->qp, &a, IBV_QP_STATE));
	init(e);
}

static void self_connected(const struct parameters *w)
{
	struct end e = make();

	join(&e, e.qp->qp_num, w);
	CHECK(state(&e) == IBV_QPS_RTS);
	all_operations(&e, &e);
	reset(&e);
	join(&e, e.qp->qp_num, w);
	all_operations(&e, &e);
	refusal(&e);
	reset(&e);
	join(&e, e.qp->qp_num, w);
	refused_read(&e);
	reset(&e);
	/* The receive is posted late, but within the time limit. */
	join(&e, e.qp->qp_num, w);
	post(&e, 1, IBV_WR_SEND, 0, 0, 8);
	struct ibv_wc wc;
	CHECK(!take(&e, &wc, 0.3));
	receive(&e, 2, HALF, 8);
	both_complete(&e, 1, &e, 2);
	/* Destroyed with requests of all kinds outstanding. */
	for (int i = 0; i < 8; i++) {
		post(&e, 1, IBV_WR_RDMA_READ, 0, HALF, HALF);
		post(&e, 2, IBV_WR_SEND, 0, 0, HALF);
	}
	unmake(&e);
}

/* The connecting end becomes ready, both ends are reset after `delay` and become ready again.
 * Requests from before the reset must have no effect, whether or not the other end had become ready
 * (`both`), and whichever end is reset first. */
static void reset_at(useconds_t delay, int both, int accepting_first,
	void (*use)(struct end *, struct end *))
{
	struct end a = make(), b = make();
	struct end *first = a.qp->qp_num < b.qp->qp_num ? &a : &b, *second = first == &a ? &b : &a;

	CODE(0, to_rtr(first, second->qp->qp_num, &usual));
	if (both)
		CODE(0, to_rtr(second, first->qp->qp_num, &usual));
	/* Even a sleep of zero yields the processor. */
	if (delay)
		usleep(delay);
	if (both && accepting_first)
		reset(second);
	reset(first);
	if (both && !accepting_first)
		reset(second);
	join(second, first->qp->qp_num, &usual);
	CHECK(state(first) == IBV_QPS_INIT);
	join(first, second->qp->qp_num, &usual);
	use(first, second);
	use(second, first);
	CHECK(state(first) == IBV_QPS_RTS && state(second) == IBV_QPS_RTS);
	unmake(&a);
	unmake(&b);
}

static void one_write(struct end *a, struct end *b)
{
	(void)b;
	post(a, 1, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	completes(a, 1, IBV_WC_SUCCESS);
}

/* Resets at any time between the connection request and its reply. */
static void reset_while_connecting(void)
{
	static const useconds_t delays[] = { 0, 20, 50, 100, 200, 500, 1000, 5000, 20000 };

	for (unsigned i = 0; i < sizeof(delays) / sizeof(*delays); i++) {
		reset_at(delays[i], 0, 0, all_operations);
		reset_at(delays[i], 1, 0, all_operations);
		reset_at(delays[i], 1, 1, all_operations);
	}
	/* The connecting thread may be preempted at any step, but that is rare. */
	for (int i = 0; i < 400; i++)
		reset_at(i / 2 % 10 * 8 + 1, 1, i % 2, one_write);
}

/* Connects two queue pairs of this process. The one with the smaller or the larger number becomes
 * ready to receive first. */
static void each_other(const struct parameters *w)
{
	for (int order = 0; order < 2; order++) {
		struct end a = make(), b = make();
		int a_first = (a.qp->qp_num < b.qp->qp_num) ^ order;
		struct end *first = a_first ? &a : &b, *second = a_first ? &b : &a;

		join(first, second->qp->qp_num, w);
		usleep(20000);
		join(second, first->qp->qp_num, w);
		all_operations(first, second);
		all_operations(second, first);
		refusal(first);
		unmake(&a);
		unmake(&b);
	}
}

static void invalid(void)
{
	struct end e = make();
	union ibv_gid own = gid;
	struct parameters w = usual;
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
	CODE(0, to_rtr(&e, e.qp->qp_num, &usual));
	w = usual;
	w.timeout = 32;
	CODE(EINVAL, to_rts(&e, &w));
	w = usual;
	w.rnr_retry = 8;
	CODE(EINVAL, to_rts(&e, &w));
	w = usual;
	w.retry_cnt = 8;
	CODE(EINVAL, to_rts(&e, &w));
	CHECK(state(&e) == IBV_QPS_RTR);
	CODE(0, to_rts(&e, &usual));
	unmake(&e);
}

/* Requests to an absent peer fail after the time given by `timeout` and `retry_cnt`. */
static void absent(uint32_t peer, int receives_too)
{
	struct end e = make();
	struct parameters w = usual;
	struct ibv_wc wc;
	double start;

	/* 8 times 0.27 s. */
	w.timeout = 16;
	join(&e, peer, &w);
	if (receives_too)
		receive(&e, 9, HALF, 8);
	CHECK(!take(&e, &wc, 2.5));
	start = now();
	post(&e, 1, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	post(&e, 2, IBV_WR_SEND, 0, HALF, 8);
	completes(&e, 1, IBV_WC_RETRY_EXC_ERR);
	CHECK(now() - start > 2.1);
	CHECK(now() - start < 10);
	completes(&e, 2, IBV_WC_WR_FLUSH_ERR);
	if (receives_too)
		completes(&e, 9, IBV_WC_WR_FLUSH_ERR);
	CHECK(state(&e) == IBV_QPS_ERR);
	reset(&e);
	join(&e, e.qp->qp_num, &usual);
	all_operations(&e, &e);
	unmake(&e);
}

/* With a `timeout` of zero, a request waits for its peer forever. */
static void patient(void)
{
	struct end a = make(), b = make();
	struct parameters w = usual;
	struct ibv_wc wc;

	w.timeout = 0;
	join(&a, b.qp->qp_num, &w);
	post(&a, 1, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	CHECK(!take(&a, &wc, 2.5));
	join(&b, a.qp->qp_num, &w);
	completes(&a, 1, IBV_WC_SUCCESS);
	unmake(&a);
	unmake(&b);
}

/* The peer was destroyed: requests posted afterwards fail, and earlier ones do not. */
static void peer_destroyed(void)
{
	struct end a = make(), b = make();
	struct ibv_wc wc;

	join(&a, b.qp->qp_num, &usual);
	join(&b, a.qp->qp_num, &usual);
	receive(&a, 3, HALF, 8);
	post(&a, 1, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	completes(&a, 1, IBV_WC_SUCCESS);
	unmake(&b);
	CHECK(!take(&a, &wc, 0.5));
	CHECK(state(&a) == IBV_QPS_RTS);
	post(&a, 2, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	completes(&a, 2, IBV_WC_RETRY_EXC_ERR);
	completes(&a, 3, IBV_WC_WR_FLUSH_ERR);
	unmake(&a);
}

/* A Send finds no receive: `rnr_retry` and the receiver's `min_rnr_timer` limit how long it waits.
 * */
static void not_ready(struct end *a, struct end *b, int rnr_retry, int min_rnr_timer, double least)
{
	struct parameters w = usual;
	struct ibv_wc wc;
	double start;

	w.rnr_retry = rnr_retry;
	w.min_rnr_timer = min_rnr_timer;
	join(a, b->qp->qp_num, &w);
	if (a != b)
		join(b, a->qp->qp_num, &w);
	receive(b, 8, HALF, 8);
	post(a, 9, IBV_WR_SEND, 0, 0, 8);
	both_complete(a, 9, b, 8);
	start = now();
	post(a, 1, IBV_WR_RDMA_WRITE, 0, HALF, 8);
	post(a, 2, IBV_WR_SEND, 0, 0, 8);
	post(a, 3, IBV_WR_SEND, 0, 0, 8);
	completes(a, 1, IBV_WC_SUCCESS);
	if (rnr_retry == 7) {
		CHECK(!take(a, &wc, least));
		receive(b, 4, HALF, 8);
		both_complete(a, 2, b, 4);
		receive(b, 5, HALF, 8);
		both_complete(a, 3, b, 5);
	} else {
		completes(a, 2, IBV_WC_RNR_RETRY_EXC_ERR);
		CHECK(now() - start > least);
		CHECK(now() - start < least + 5);
		completes(a, 3, IBV_WC_WR_FLUSH_ERR);
	}
}

static void receiver_not_ready(void)
{
	/* Codes 1 and 31 are 10 µs and 491 ms. */
	static const struct { int rnr_retry, min_rnr_timer; double least; } rows[] = {
		{ 0, 31, 0 }, { 3, 31, 1.4 }, { 6, 1, 0 }, { 7, 1, 2.5 },
	};

	for (unsigned i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
		struct end a = make(), b = make(), self = make();

		not_ready(&a, &b, rows[i].rnr_retry, rows[i].min_rnr_timer, rows[i].least);
		not_ready(&self, &self, rows[i].rnr_retry, rows[i].min_rnr_timer, rows[i].least);
		unmake(&a);
		unmake(&b);
		unmake(&self);
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

	struct parameters by_lid = usual, by_none = usual;

	by_lid.by_lid = by_none.by_lid = 1;
	by_lid.lid = lid;
	self_connected(&usual);
	self_connected(&by_lid);
	each_other(&usual);
	reset_while_connecting();
	each_other(&by_lid);
	each_other(&by_none);
	invalid();
	/* Both roles: a number below and one above ours. Nothing listens on port 9 of loopback. */
	absent(9, 1);
	absent(0xff0009, 0);
	patient();
	peer_destroyed();
	receiver_not_ready();
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	return result();
}
