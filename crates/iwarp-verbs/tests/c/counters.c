/* Tests of completion counters: the counts of each operation at both ends, in requests and in
 * bytes; setting values; and errors of attaching and destroying. Older headers do not declare the
 * functions, so this file declares them under other names. */
#include "pair.h"

struct caps {
	uint64_t max_value;
	uint32_t max_counters, ops;
};

struct attributes {
	uint32_t comp_mask, type, flags;
};

struct attach {
	uint32_t comp_mask, op_mask;
};

#define ATOMIC_WRITE ((enum ibv_wr_opcode)15)

enum { WRS, BYTES };
enum { SEND = 1, RECV = 2, READ = 4, REMOTE_READ = 8, WRITE = 16, REMOTE_WRITE = 32, ALL = 63,
	KINDS = 6 };

int query_caps(struct ibv_context *, void *, size_t) __asm__("_ibv_query_comp_cntr_caps");
void *create(struct ibv_context *, struct attributes *) __asm__("ibv_create_comp_cntr");
int destroy(void *) __asm__("ibv_destroy_comp_cntr");
int set(void *, uint64_t) __asm__("ibv_set_comp_cntr");
int set_err(void *, uint64_t) __asm__("ibv_set_err_comp_cntr");
int inc(void *, uint64_t) __asm__("ibv_inc_comp_cntr");
int inc_err(void *, uint64_t) __asm__("ibv_inc_err_comp_cntr");
int read_count(void *, uint64_t *) __asm__("ibv_read_comp_cntr");
int read_err(void *, uint64_t *) __asm__("ibv_read_err_comp_cntr");
int attach(struct ibv_qp *, void *, struct attach *) __asm__("ibv_qp_attach_comp_cntr");

static void *counter(uint32_t type)
{
	struct attributes a = { .type = type };
	void *cntr = create(context, &a);

	NEED(cntr);
	return cntr;
}

static uint64_t count(void *cntr)
{
	uint64_t value = 12345;

	CODE(0, read_count(cntr, &value));
	return value;
}

static uint64_t errors(void *cntr)
{
	uint64_t value = 12345;

	CODE(0, read_err(cntr, &value));
	return value;
}

static int attach_ops(struct ibv_qp *qp, void *cntr, uint32_t ops)
{
	struct attach a = { .op_mask = ops };

	return attach(qp, cntr, &a);
}

static void test_values(void)
{
	struct attributes bad[] = { { .comp_mask = 1 }, { .type = 2 }, { .flags = 1 } };
	struct caps caps[2];
	void *c = counter(WRS);
	uint64_t value;

	memset(caps, 0xa5, sizeof(caps));
	CODE(0, query_caps(context, caps, sizeof(caps[0])));
	CHECK(caps[0].max_value == UINT64_MAX && caps[0].max_counters > 0 && caps[0].ops == ALL);
	CHECK(caps[1].max_value == 0xa5a5a5a5a5a5a5a5);
	/* Fields that this library does not know are zero. */
	CODE(0, query_caps(context, caps, sizeof(caps)));
	CHECK(caps[1].max_value == 0);
	CODE(EINVAL, query_caps(NULL, caps, sizeof(caps)));
	IS_NULL(EOPNOTSUPP, create(context, &bad[0]));
	IS_NULL(EOPNOTSUPP, create(context, &bad[1]));
	IS_NULL(EINVAL, create(context, &bad[2]));
	IS_NULL(EINVAL, create(context, NULL));
	IS_NULL(EINVAL, create(NULL, &bad[0]));

	CHECK(count(c) == 0 && errors(c) == 0);
	CODE(0, inc(c, 5));
	CODE(0, inc_err(c, 7));
	CODE(0, inc(c, 5));
	CHECK(count(c) == 10 && errors(c) == 7);
	CODE(0, set(c, UINT64_MAX));
	CHECK(count(c) == UINT64_MAX && errors(c) == 7);
	CODE(0, set_err(c, 1));
	/* An increment beyond the maximum wraps. */
	CODE(0, inc(c, 3));
	CHECK(count(c) == 2 && errors(c) == 1);
	CODE(EINVAL, read_count(c, NULL));
	CODE(0, destroy(c));
	CODE(EINVAL, destroy(c));
	CODE(EINVAL, read_count(c, &value));
	CODE(EINVAL, set(c, 1));
}

static void test_attach(void)
{
	struct attach bad = { .comp_mask = 1, .op_mask = SEND };
	struct attributes any = { 0 };
	struct ibv_context *second;
	struct ibv_device **list = ibv_get_device_list(NULL);
	void *a = counter(WRS), *b = counter(WRS), *elsewhere;
	struct pair p;

	create_pair(&p, IBV_QPT_RC, 0);
	CODE(EINVAL, attach(p.qp[0], a, &bad));
	CODE(EINVAL, attach(p.qp[0], a, NULL));
	CODE(EINVAL, attach_ops(p.qp[0], a, 0));
	CODE(EOPNOTSUPP, attach_ops(p.qp[0], a, 64));
	CODE(EINVAL, attach_ops(NULL, a, SEND));
	CODE(EINVAL, attach_ops(p.qp[0], NULL, SEND));
	NEED(list && (second = ibv_open_device(list[0])));
	NEED((elsewhere = create(second, &any)));
	CODE(EINVAL, attach_ops(p.qp[0], elsewhere, SEND));
	CODE(0, destroy(elsewhere));
	CODE(0, ibv_close_device(second));
	ibv_free_device_list(list);

	CODE(0, attach_ops(p.qp[0], a, SEND | READ));
	CODE(EBUSY, attach_ops(p.qp[0], b, READ | WRITE));
	CODE(EBUSY, attach_ops(p.qp[0], a, SEND));
	CODE(0, attach_ops(p.qp[0], b, WRITE));
	to_init(p.qp[0]);
	to_init(p.qp[1]);
	CODE(0, attach_ops(p.qp[0], b, RECV));
	CODE(0, attach_ops(p.qp[1], a, SEND));
	connect_pair(&p);
	CODE(EINVAL, attach_ops(p.qp[0], b, REMOTE_WRITE));
	CODE(EBUSY, destroy(a));
	CODE(EBUSY, destroy(b));
	CODE(0, ibv_destroy_qp(p.qp[0]));
	CODE(0, destroy(b));
	CODE(EBUSY, destroy(a));
	CODE(0, ibv_destroy_qp(p.qp[1]));
	CODE(0, destroy(a));
	CODE(0, ibv_destroy_cq(p.cq[0]));
	CODE(0, ibv_destroy_cq(p.cq[1]));

	struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, NULL, 0);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .cap = { 1, 1, 1, 1, 0 },
		.qp_type = IBV_QPT_UD };
	struct ibv_qp *ud = ibv_create_qp(pd, &init);

	NEED(ud);
	a = counter(WRS);
	CODE(EOPNOTSUPP, attach_ops(ud, a, SEND));
	CODE(0, destroy(a));
	CODE(0, ibv_destroy_qp(ud));
	CODE(0, ibv_destroy_cq(cq));
}

/* Waits until a counter reaches a value, without polling any queue. */
static void wait_for_count(void *cntr, uint64_t value, int line)
{
	time_t end = time(NULL) + 30;

	while (count(cntr) != value)
		if (time(NULL) > end) {
			fprintf(stderr, "line %d: %llu instead of %llu\n", line, (unsigned long long)count(cntr),
				(unsigned long long)value);
			exit(2);
		}
}

/* Posts an unsignaled request of each kind. Each increments its own counters, and no others. */
static void test_operations(enum ibv_qp_type type)
{
	const uint32_t length = 10000;
	uint64_t remote_addr = (uintptr_t)memory + PAIR_SIZE;
	static const struct {
		enum ibv_wr_opcode op;
		uint32_t local, remote;
	} table[] = {
		{ IBV_WR_SEND, SEND, RECV },
		{ IBV_WR_RDMA_WRITE, WRITE, REMOTE_WRITE },
		{ IBV_WR_RDMA_WRITE_WITH_IMM, WRITE, REMOTE_WRITE | RECV },
		{ IBV_WR_SEND_WITH_IMM, SEND, RECV },
		{ IBV_WR_RDMA_READ, READ, REMOTE_READ },
		{ IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 0 },
		{ ATOMIC_WRITE, WRITE, REMOTE_WRITE },
	};
	void *wrs[2][KINDS], *bytes[2][KINDS];
	uint64_t requests[2][KINDS] = { 0 };
	struct pair p;

	/* A queue pair can have one counter per kind, so a second pair counts bytes. */
	for (int in_bytes = 0; in_bytes < 2; in_bytes++) {
		void *(*counters)[KINDS] = in_bytes ? bytes : wrs;

		memset(requests, 0, sizeof(requests));
		create_pair(&p, type, 0);
		for (int end = 0; end < 2; end++)
			for (int kind = 0; kind < KINDS; kind++) {
				counters[end][kind] = counter(in_bytes ? BYTES : WRS);
				CODE(0, attach_ops(p.qp[end], counters[end][kind], 1 << kind));
			}
		to_init(p.qp[0]);
		to_init(p.qp[1]);
		connect_pair(&p);
		for (unsigned i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
			int is_atomic = table[i].op == IBV_WR_ATOMIC_FETCH_AND_ADD || table[i].op == ATOMIC_WRITE;
			uint32_t len = is_atomic ? 8 : length;

			if (type == IBV_QPT_UC && (table[i].op == IBV_WR_RDMA_READ || is_atomic))
				continue;
			if (table[i].remote & RECV)
				receive(&p, len);
			post_to(&p, table[i].op, remote_addr, mr->rkey, len, 0);
			for (int kind = 0; kind < KINDS; kind++) {
				/* The completion of a Write with immediate data counts the bytes of the Write. */
				requests[0][kind] += table[i].local >> kind & 1 ? (in_bytes ? len : 1) : 0;
				requests[1][kind] += table[i].remote >> kind & 1 ? (in_bytes ? len : 1) : 0;
				wait_for_count(counters[0][kind], requests[0][kind], __LINE__);
				wait_for_count(counters[1][kind], requests[1][kind], __LINE__);
			}
		}
		/* Counters keep their values after the queue pairs are destroyed. No request failed. */
		destroy_pair(&p);
		for (int end = 0; end < 2; end++)
			for (int kind = 0; kind < KINDS; kind++) {
				CHECK(count(counters[end][kind]) == requests[end][kind] && errors(counters[end][kind]) == 0);
				CODE(0, destroy(counters[end][kind]));
			}
	}
}

static void receive_flushed(struct pair *p)
{
	struct ibv_recv_wr wr = { 0 }, *bad;

	CODE(0, ibv_post_recv(p->qp[0], &wr, &bad));
	CODE(IBV_WC_WR_FLUSH_ERR, completion(p->cq[0]).status);
}

/* Creates a new first queue pair, so that the pair can be destroyed as usual. */
static void create_again(struct pair *p)
{
	struct ibv_qp_init_attr init = { .send_cq = p->cq[0], .recv_cq = p->cq[0],
		.cap = { 1, 1, 1, 1, 0 }, .qp_type = IBV_QPT_RC };

	NEED((p->qp[0] = ibv_create_qp(pd, &init)));
}

/* A second counter of a queue pair starts at zero, without the counts of the first counter. */
static void post_failed_read(struct pair *p, void *cntr)
{
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR }, reset = { .qp_state = IBV_QPS_RESET };
	void *other = counter(WRS);

	to_init(p->qp[0]);
	CODE(0, ibv_modify_qp(p->qp[0], &error, IBV_QP_STATE));
	post_to(p, IBV_WR_RDMA_READ, 0, 0, 8, 0);
	CODE(IBV_WC_WR_FLUSH_ERR, completion(p->cq[0]).status);
	CHECK(count(cntr) == 0 && errors(cntr) == 1);
	receive_flushed(p);
	CODE(0, ibv_modify_qp(p->qp[0], &reset, IBV_QP_STATE));
	CODE(0, attach_ops(p->qp[0], other, RECV));
	CHECK(count(other) == 0 && errors(other) == 0);
	CODE(0, ibv_destroy_qp(p->qp[0]));
	CHECK(errors(other) == 0 && errors(cntr) == 1);
	CODE(0, destroy(other));
	create_again(p);
}

/* Several queue pairs share a counter, which the program sets in between. Flushed requests are
 * counted as errors. */
static void test_shared_counter(void)
{
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	void *c = counter(WRS);
	struct pair p, q;

	create_pair(&p, IBV_QPT_RC, 0);
	create_pair(&q, IBV_QPT_RC, 0);
	CODE(0, attach_ops(p.qp[0], c, SEND | WRITE));
	CODE(0, attach_ops(q.qp[0], c, WRITE));
	CODE(0, attach_ops(p.qp[1], c, RECV));
	to_init(p.qp[0]);
	to_init(p.qp[1]);
	to_init(q.qp[0]);
	to_init(q.qp[1]);
	connect_pair(&p);
	connect_pair(&q);
	post_to(&p, IBV_WR_RDMA_WRITE, (uintptr_t)memory + PAIR_SIZE, mr->rkey, 8, 0);
	post_to(&q, IBV_WR_RDMA_WRITE, (uintptr_t)memory + PAIR_SIZE, mr->rkey, 8, 0);
	receive(&p, 8);
	post_to(&p, IBV_WR_SEND, 0, 0, 8, 0);
	wait_for_count(c, 4, __LINE__);
	CODE(0, set(c, 100));
	CODE(0, inc(c, 10));
	post_to(&q, IBV_WR_RDMA_WRITE, (uintptr_t)memory + PAIR_SIZE, mr->rkey, 8, 0);
	wait_for_count(c, 111, __LINE__);
	/* A counter keeps its value when its queue pair is destroyed, and can be attached again. */
	destroy_pair(&q);
	CHECK(count(c) == 111);
	receive(&p, 8);
	receive(&p, 8);
	CHECK(errors(c) == 0);
	CODE(0, ibv_modify_qp(p.qp[1], &error, IBV_QP_STATE));
	CODE(IBV_WC_RECV, completion(p.cq[1]).opcode);
	CODE(IBV_WC_WR_FLUSH_ERR, completion(p.cq[1]).status);
	CODE(IBV_WC_WR_FLUSH_ERR, completion(p.cq[1]).status);
	CHECK(errors(c) == 2 && count(c) == 111);
	CODE(0, set_err(c, 0));
	CODE(0, ibv_modify_qp(p.qp[0], &error, IBV_QP_STATE));
	post_to(&p, IBV_WR_SEND, 0, 0, 8, IBV_SEND_SIGNALED);
	CODE(IBV_WC_WR_FLUSH_ERR, completion(p.cq[0]).status);
	CHECK(errors(c) == 1 && count(c) == 111);
	/* A counter that is attached to a used queue pair starts at zero. */
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	void *new_counter = counter(WRS);

	CODE(0, ibv_modify_qp(p.qp[0], &reset, IBV_QP_STATE));
	CODE(EBUSY, attach_ops(p.qp[0], new_counter, SEND));
	CODE(0, attach_ops(p.qp[0], new_counter, READ));
	post_failed_read(&p, new_counter);
	destroy_pair(&p);
	CODE(0, destroy(new_counter));
	CODE(0, destroy(c));
}

int main(void)
{
	open_device();
	test_values();
	test_attach();
	test_operations(IBV_QPT_RC);
	test_operations(IBV_QPT_UC);
	test_shared_counter();
	close_device();
	return result();
}
