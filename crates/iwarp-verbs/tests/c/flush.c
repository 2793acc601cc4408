/* Tests of ibv_wr_flush: a flush completes after all earlier requests, and needs a connection type
 * that supports RDMA Reads. */
#include "pair.h"

enum { GLOBAL = 1, PERSISTENT = 2, RANGE = 0, WHOLE = 1 };
enum { ACCESS_FLUSH_GLOBAL = 1 << 8, ACCESS_FLUSH_PERSISTENT = 1 << 9 };

static struct pair p;

/* The function pointer is after the last member of `struct ibv_qp_ex` in rdma-core 44, so the test
 * computes its address. */
static int flush(uint8_t placement, uint8_t level, uint64_t id)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(p.qp[0]);
	void (*wr_flush)(struct ibv_qp_ex *, uint32_t, uint64_t, size_t, uint8_t, uint8_t);

	NEED(ex);
	memcpy(&wr_flush, (char *)&ex->wr_atomic_write + sizeof(void *), sizeof(wr_flush));
	ibv_wr_start(ex);
	ex->wr_id = id;
	ex->wr_flags = IBV_SEND_SIGNALED;
	wr_flush(ex, mr->rkey, (uintptr_t)memory + PAIR_SIZE, PAIR_SIZE, placement, level);
	return ibv_wr_complete(ex);
}

static void test_access_flags(void)
{
	struct ibv_device_attr_ex attr;
	struct ibv_mr *m;

	CODE(0, ibv_query_device_ex(context, NULL, &attr));
	CHECK(attr.device_cap_flags_ex & 1ull << 38);
	CHECK(!(attr.device_cap_flags_ex & 1ull << 39));
	NEED((m = ibv_reg_mr(pd, memory, PAIR_SIZE, PAIR_ACCESS | ACCESS_FLUSH_GLOBAL)));
	CODE(0, ibv_dereg_mr(m));
	IS_NULL(EINVAL, ibv_reg_mr(pd, memory, PAIR_SIZE, PAIR_ACCESS | ACCESS_FLUSH_PERSISTENT));
}

/* When a flush completes, the data of all earlier requests is in place, also that of unsignaled
 * ones. */
static void test_flushes(void)
{
	for (int round = 1; round < 50; round++) {
		memset(memory, round, PAIR_SIZE);
		post_to(&p, IBV_WR_RDMA_WRITE, (uintptr_t)memory + PAIR_SIZE, mr->rkey, PAIR_SIZE, 0);
		CODE(0, flush(GLOBAL, round % 2 ? RANGE : WHOLE, round));
		struct ibv_wc wc = completion(p.cq[0]);
		CHECK(wc.status == IBV_WC_SUCCESS && (int)wc.opcode == PAIR_WC_FLUSH && (int)wc.wr_id == round);
		CHECK(memcmp(memory, memory + PAIR_SIZE, PAIR_SIZE) == 0);
	}
	CODE(EOPNOTSUPP, flush(PERSISTENT, RANGE, 0));
	CODE(EOPNOTSUPP, flush(GLOBAL | PERSISTENT, RANGE, 0));
	CODE(EINVAL, flush(0, RANGE, 0));
	CODE(EINVAL, flush(4, RANGE, 0));
	CODE(EINVAL, flush(GLOBAL, WHOLE + 1, 0));
}

/* A flush request on a queue pair in the error state completes with a flush error. */
static void test_flush_after_error(void)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_ERR };
	struct ibv_wc wc;

	CODE(0, ibv_modify_qp(p.qp[0], &a, IBV_QP_STATE));
	CODE(0, flush(GLOBAL, RANGE, 99));
	wc = completion(p.cq[0]);
	CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 99);
}

int main(void)
{
	open_device();
	test_access_flags();
	create_pair(&p, IBV_QPT_RC, IBV_QP_EX_WITH_RDMA_WRITE | PAIR_WITH_FLUSH);
	to_init(p.qp[0]);
	to_init(p.qp[1]);
	connect_pair(&p);
	test_flushes();
	test_flush_after_error();
	destroy_pair(&p);
	/* An unreliable connection has no responses, so it does not support flushes. */
	struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, NULL, 0);
	struct ibv_qp_init_attr_ex init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UC, .pd = pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
			.send_ops_flags = PAIR_WITH_FLUSH };
	errno = 0;
	CHECK(!ibv_create_qp_ex(context, &init) && errno);
	CODE(0, ibv_destroy_cq(cq));
	close_device();
	return result();
}
