/* Tests of null regions. The data of Writes and atomics to such a region is discarded, Reads and
 * atomics return zeros, and receives may use it. */
#include "pair.h"

static struct pair p;

static enum ibv_wc_status execute(enum ibv_wr_opcode op, uint64_t to, uint32_t rkey, uint32_t len)
{
	post_to(&p, op, to, rkey, len, IBV_SEND_SIGNALED);
	return completion(p.cq[0]).status;
}

static void test_remote_access(struct ibv_mr *null)
{
	static const uint64_t addresses[] = { 0, 8, 1ull << 40, UINT64_MAX - PAIR_SIZE - 7 };

	for (unsigned i = 0; i < 4; i++) {
		memset(memory, 0x11, sizeof(memory));
		CODE(IBV_WC_SUCCESS, execute(IBV_WR_RDMA_WRITE, addresses[i], null->rkey, PAIR_SIZE));
		CODE(IBV_WC_SUCCESS, execute(IBV_WR_RDMA_READ, addresses[i], null->rkey, PAIR_SIZE));
		CHECK(memory[0] == 0 && !memcmp(memory, memory + 1, PAIR_SIZE - 1));
		CHECK(memory[PAIR_SIZE] == 0x11);
	}
	for (int round = 0; round < 3; round++) {
		uint64_t old = 77;

		memcpy(memory, &old, sizeof(old));
		CODE(IBV_WC_SUCCESS, execute(IBV_WR_ATOMIC_FETCH_AND_ADD, 16, null->rkey, 8));
		CHECK(!memcmp(memory, (uint64_t[1]){ 0 }, 8));
		memcpy(memory, &old, sizeof(old));
		CODE(IBV_WC_SUCCESS, execute(IBV_WR_ATOMIC_CMP_AND_SWP, 16, null->rkey, 8));
		CHECK(!memcmp(memory, (uint64_t[1]){ 0 }, 8));
	}
}

/* A receive whose first element is in the null region, and whose second element is in other
 * memory. */
static void test_receive(struct ibv_mr *null)
{
	struct ibv_sge sges[2] = { { 0, 100, null->lkey },
		{ (uintptr_t)memory + PAIR_SIZE, 100, mr->lkey } };
	struct ibv_recv_wr wr = { .sg_list = sges, .num_sge = 2 }, *bad;
	struct ibv_wc wc;

	for (int i = 0; i < 200; i++)
		memory[i] = i;
	memset(memory + PAIR_SIZE, 0x22, 200);
	CODE(0, ibv_post_recv(p.qp[1], &wr, &bad));
	CODE(IBV_WC_SUCCESS, execute(IBV_WR_SEND, 0, 0, 200));
	wc = completion(p.cq[1]);
	CHECK(wc.status == IBV_WC_SUCCESS && wc.byte_len == 200);
	CHECK(!memcmp(memory + PAIR_SIZE, memory + 100, 100) && memory[PAIR_SIZE + 100] == 0x22);
}

int main(void)
{
	struct ibv_pd *other;
	struct ibv_mr *null, *foreign;

	open_device();
	create_pair(&p, IBV_QPT_RC, 0);
	to_init(p.qp[0]);
	to_init(p.qp[1]);
	connect_pair(&p);
	NEED((null = ibv_alloc_null_mr(pd)));
	/* perftest sends the lkey to its peer, so the rkey must be the same. */
	CHECK(null->lkey && null->rkey == null->lkey && null->length == SIZE_MAX && !null->addr);
	test_remote_access(null);
	test_receive(null);
	/* A null region of another protection domain is not accessible, nor is a deregistered one. */
	NEED((other = ibv_alloc_pd(context)) && (foreign = ibv_alloc_null_mr(other)));
	CODE(IBV_WC_REM_ACCESS_ERR, execute(IBV_WR_RDMA_WRITE, 0, foreign->rkey, 8));
	destroy_pair(&p);
	create_pair(&p, IBV_QPT_RC, 0);
	to_init(p.qp[0]);
	to_init(p.qp[1]);
	connect_pair(&p);
	uint32_t old_rkey = null->rkey;
	CODE(0, ibv_dereg_mr(null));
	CODE(IBV_WC_REM_ACCESS_ERR, execute(IBV_WR_RDMA_READ, 0, old_rkey, 8));
	destroy_pair(&p);
	CODE(0, ibv_dereg_mr(foreign));
	CODE(0, ibv_dealloc_pd(other));
	close_device();
	return result();
}
