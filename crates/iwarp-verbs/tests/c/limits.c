/* Tests of queue limits, of objects of different contexts, and of the errors of invalid calls. Each
 * group of rows names the driver or the part of Linux that defines its values. docs/errno.md has
 * the same table. */
#include <sys/mman.h>

#include "by_number.h"

static struct ibv_context *context, *other;
static struct ibv_pd *pd, *other_pd;
static struct ibv_cq *cq, *other_cq;
static struct ibv_mr *mr;
static struct ibv_qp *qp, *peer;
static char memory[8192];

static struct ibv_qp_init_attr qp_attributes(void)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 2, .max_recv_sge = 1,
			.max_inline_data = 64 } };

	return attr;
}

/* A queue pair with a shared receive queue has no receive queue of its own. The sizes that the
 * program passes for one are ignored. */
static void test_srq_ignores_receive_sizes(void)
{
	struct ibv_srq_init_attr queue = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &queue);
	struct ibv_qp_init_attr attr = qp_attributes();
	struct ibv_qp *shared;

	NEED(srq);
	attr.srq = srq;
	attr.cap.max_recv_wr = attr.cap.max_recv_sge = UINT32_MAX;
	shared = ibv_create_qp(pd, &attr);
	CHECK(shared);
	CODE(0, (int)attr.cap.max_recv_wr);
	CODE(0, (int)attr.cap.max_recv_sge);
	CODE(0, ibv_destroy_qp(shared));
	attr.qp_type = IBV_QPT_UD;
	attr.cap.max_recv_wr = attr.cap.max_recv_sge = UINT32_MAX;
	shared = ibv_create_qp(pd, &attr);
	CHECK(shared);
	CODE(0, ibv_destroy_qp(shared));
	attr.cap.max_send_wr = UINT32_MAX;
	IS_NULL(EINVAL, ibv_create_qp(pd, &attr));
	attr = qp_attributes();
	attr.cap.max_recv_wr = UINT32_MAX;
	IS_NULL(EINVAL, ibv_create_qp(pd, &attr));
	attr = qp_attributes();
	attr.cap.max_recv_sge = 1000;
	IS_NULL(EINVAL, ibv_create_qp(pd, &attr));
	CODE(0, ibv_destroy_srq(srq));
}

/* A limit is checked against the new depth of the same call. A refused call has no effect. */
static void test_srq_limit_and_depth(void)
{
	struct ibv_srq_init_attr queue = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &queue);
	struct ibv_srq_attr attr = { .max_wr = 40, .srq_limit = 30 }, now;
	int both = IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT;

	NEED(srq);
	CODE(EINVAL, ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT));
	CODE(0, ibv_modify_srq(srq, &attr, both));
	CODE(0, ibv_query_srq(srq, &now));
	CHECK(now.max_wr == 40 && now.srq_limit == 30);
	attr.srq_limit = 41;
	CODE(EINVAL, ibv_modify_srq(srq, &attr, both));
	attr.max_wr = 20;
	CODE(EINVAL, ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR));
	CODE(0, ibv_query_srq(srq, &now));
	CHECK(now.max_wr == 40 && now.srq_limit == 30);
	attr.srq_limit = 10;
	CODE(0, ibv_modify_srq(srq, &attr, both));
	CODE(0, ibv_query_srq(srq, &now));
	CHECK(now.max_wr == 20 && now.srq_limit == 10);
	CODE(0, ibv_destroy_srq(srq));
}

/* A request with too many scatter/gather elements fails before the library reads the elements. The
 * requests of this test have no elements at all. */
static void test_too_many_elements(void)
{
	int numbers[] = { 3, 40, 1 << 20, INT32_MAX, -1, INT32_MIN };
	struct ibv_srq_init_attr queue = { .attr = { .max_wr = 4, .max_sge = 2 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &queue);
	unsigned int i;

	NEED(srq);
	for (i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
		int flags;

		for (flags = 0; flags <= IBV_SEND_INLINE; flags += IBV_SEND_INLINE) {
			struct ibv_send_wr bad_one = { .opcode = IBV_WR_SEND, .num_sge = numbers[i],
				.send_flags = flags }, *bad = NULL;
			struct ibv_send_wr chain = { .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
				.next = &bad_one, .wr.rdma.rkey = mr->rkey };

			CODE(EINVAL, ibv_post_send(qp, &bad_one, &bad));
			CHECK(bad == &bad_one);
			bad = NULL;
			CODE(EINVAL, ibv_post_send(qp, &chain, &bad));
			CHECK(bad == &bad_one);
			expect_completions(cq, 1, IBV_WC_SUCCESS);
		}
		struct ibv_recv_wr wr = { .num_sge = numbers[i] }, *bad = NULL;

		CODE(EINVAL, ibv_post_recv(qp, &wr, &bad));
		CHECK(bad == &wr);
		bad = NULL;
		CODE(EINVAL, ibv_post_srq_recv(srq, &wr, &bad));
		CHECK(bad == &wr);
	}
	struct ibv_recv_wr two = { .num_sge = 2 }, *bad = NULL;

	CODE(EINVAL, ibv_post_recv(qp, &two, &bad));
	CHECK(bad == &two);
	CODE(0, ibv_destroy_srq(srq));
}

/* Objects of different contexts cannot be combined, even if both contexts have the same device. */
static void test_objects_of_another_context(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(other);
	struct ibv_srq_init_attr queue = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(other_pd, &queue);
	struct ibv_mw *window = ibv_alloc_mw(other_pd, IBV_MW_TYPE_1);
	struct ibv_mr *other_mr = ibv_reg_mr(other_pd, memory, 64,
		IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
	struct ibv_mw_bind bind = { .bind_info = { .mr = mr, .addr = (uintptr_t)memory, .length = 64,
		.mw_access_flags = IBV_ACCESS_REMOTE_READ } };
	struct ibv_parent_domain_init_attr parent = { .pd = other_pd };
	struct ibv_qp_init_attr_ex ex = { .qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq, .pd = pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
			.send_ops_flags = IBV_QP_EX_WITH_SEND, .cap = { 1, 1, 1, 1, 0 } };
	struct ibv_qp_init_attr attr;

	NEED(channel && srq && window && other_mr);
	IS_NULL(EINVAL, ibv_create_cq(context, 4, NULL, channel, 0));
	attr = qp_attributes();
	attr.send_cq = other_cq;
	IS_NULL(EINVAL, ibv_create_qp(pd, &attr));
	attr = qp_attributes();
	attr.recv_cq = other_cq;
	IS_NULL(EINVAL, ibv_create_qp(pd, &attr));
	attr = qp_attributes();
	attr.srq = srq;
	IS_NULL(EINVAL, ibv_create_qp(pd, &attr));
	attr = qp_attributes();
	attr.qp_type = IBV_QPT_UD;
	attr.recv_cq = other_cq;
	IS_NULL(EINVAL, ibv_create_qp(pd, &attr));
	IS_NULL(EINVAL, ibv_create_qp(other_pd, &attr));
	IS_NULL(EINVAL, ibv_create_qp_ex(other, &ex));
	IS_NULL(EINVAL, ibv_alloc_parent_domain(context, &parent));
	MINUS_ONE(EINVAL, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, other_pd, NULL, 0, 0));
	/* An inline function of the header compares the protection domains of the window and the
	 * region. */
	CODE(EPERM, ibv_bind_mw(qp, window, &bind));
	bind.bind_info.mr = other_mr;
	CODE(EINVAL, ibv_bind_mw(qp, window, &bind));
	CODE(0, ibv_dealloc_mw(window));
	CODE(0, ibv_dereg_mr(other_mr));
	CODE(0, ibv_destroy_srq(srq));
	CODE(0, ibv_destroy_comp_channel(channel));
}

/* An address handle of another context. Its protection domain may have the same number as that of
 * the queue pair. */
static void test_address_handle_of_another_context(void)
{
	struct ibv_qp_init_attr attr = qp_attributes();
	struct ibv_qp_attr to = attributes(context, IBV_QPS_INIT, 0);
	struct ibv_ah *ah = ibv_create_ah(other_pd, &to.ah_attr);
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .wr.ud = { ah, 5, 5 } }, *bad = NULL;
	struct ibv_qp *ud;

	attr.qp_type = IBV_QPT_UD;
	ud = ibv_create_qp(pd, &attr);
	NEED(ah && ud);
	NEED(ibv_modify_qp(ud, &to, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
	NEED(move_to(ud, IBV_QPS_RTR, 0, IBV_QP_STATE) == 0);
	NEED(move_to(ud, IBV_QPS_RTS, 0, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
	CODE(EINVAL, ibv_post_send(ud, &wr, &bad));
	CHECK(bad == &wr);
	CODE(0, ibv_destroy_qp(ud));
	CODE(0, ibv_destroy_ah(ah));
}

static int error_of(const void *got)
{
	return got ? 0 : errno;
}

static int send_error(int opcode, int flags, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)memory, length, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = flags },
		*bad = NULL;
	int result = ibv_post_send(qp, &wr, &bad);

	CHECK(bad == &wr);
	return result;
}

static int bind_error(unsigned int access)
{
	struct ibv_mw *window = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	struct ibv_mw_bind bind =
		{ .bind_info = { .mr = mr, .addr = (uintptr_t)memory, .length = 64, .mw_access_flags = access } };
	int result;

	NEED(window);
	result = ibv_bind_mw(qp, window, &bind);
	CODE(0, ibv_dealloc_mw(window));
	return result;
}

static int create_qp_error(int type)
{
	struct ibv_qp_init_attr attr = qp_attributes();

	attr.qp_type = type;
	return error_of(ibv_create_qp(pd, &attr));
}

static int post_error_in_reset(int receive)
{
	struct ibv_qp_init_attr attr = qp_attributes();
	struct ibv_qp *reset_qp = ibv_create_qp(pd, &attr);
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND }, *bad;
	struct ibv_recv_wr recv_wr = { .num_sge = 0 }, *recv_bad;
	int result;

	NEED(reset_qp);
	result = receive ? ibv_post_recv(reset_qp, &recv_wr, &recv_bad) : ibv_post_send(reset_qp, &wr,
		&bad);
	NEED(ibv_destroy_qp(reset_qp) == 0);
	return result;
}

struct row {
	const char *call;
	int want, got;
};

static void test_errors(int roce)
{
	char *hole = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	const int write = IBV_ACCESS_LOCAL_WRITE;

	NEED(hole != MAP_FAILED && munmap(hole + 4096, 4096) == 0);
	const struct row rows[] = {
		/* Registration: ib_umem_get and siw_reg_user_mr. */
		{ "ibv_reg_mr of no octets", EINVAL, error_of(ibv_reg_mr(pd, memory, 0, write)) },
		{ "ibv_reg_mr beyond the address space", EINVAL,
			error_of(ibv_reg_mr(pd, (void *)-4096L, 8192, write)) },
		{ "ibv_reg_mr into a hole", EFAULT, error_of(ibv_reg_mr(pd, hole, 8192, write)) },
		{ "ibv_reg_mr with remote write only", EINVAL,
			error_of(ibv_reg_mr(pd, memory, 8, IBV_ACCESS_REMOTE_WRITE)) },
		/* Queue pairs: uverbs, then siw_create_qp. */
		{ "ibv_create_qp of type 0", EINVAL, create_qp_error(0) },
		{ "ibv_create_qp of type 100", EINVAL, create_qp_error(100) },
		{ "ibv_create_qp for raw packets", EOPNOTSUPP, create_qp_error(IBV_QPT_RAW_PACKET) },
		/* Requests: rxe_post_send, siw_post_send of their providers. */
		{ "ibv_post_send with opcode 100", EINVAL, send_error(100, 0, 8) },
		{ "ibv_post_send with opcode TSO", EINVAL, send_error(IBV_WR_TSO, 0, 8) },
		{ "ibv_post_send of an inline Read", EINVAL, send_error(IBV_WR_RDMA_READ, IBV_SEND_INLINE, 8) },
		{ "ibv_post_send with too much inline data", EINVAL,
			send_error(IBV_WR_SEND, IBV_SEND_INLINE, 8000) },
		{ "ibv_post_send of an atomic on 4 octets", EINVAL, send_error(IBV_WR_ATOMIC_FETCH_AND_ADD, 0,
			4) },
		{ "ibv_post_send in RESET", EINVAL, post_error_in_reset(0) },
		{ "ibv_post_recv in RESET", roce ? EINVAL : 0, post_error_in_reset(1) },
		/* Windows: the providers of mlx5 and rxe. */
		{ "ibv_bind_mw with the right to bind", EINVAL, bind_error(IBV_ACCESS_MW_BIND |
			IBV_ACCESS_REMOTE_READ) },
		{ "ibv_bind_mw with on-demand paging", EINVAL, bind_error(IBV_ACCESS_ON_DEMAND) },
		/* Completion queues: ib_uverbs_create_cq, siw_create_cq. */
		{ "ibv_create_cq of no entries", EINVAL, error_of(ibv_create_cq(context, 0, NULL, NULL, 0)) },
		{ "ibv_create_cq with vector 1", EINVAL, error_of(ibv_create_cq(context, 4, NULL, NULL, 1)) },
		{ "ibv_destroy_cq in use", EBUSY, ibv_destroy_cq(cq) },
		{ "ibv_dealloc_pd in use", EBUSY, ibv_dealloc_pd(pd) },
	};
	unsigned int i;

	for (i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		if (rows[i].got != rows[i].want)
			fprintf(stderr, "%s\n", rows[i].call);
		CODE(rows[i].want, rows[i].got);
	}
	NEED(munmap(hole, 4096) == 0);
}

int main(int argc, char **argv)
{
	const int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		IBV_ACCESS_MW_BIND;
	struct ibv_qp_init_attr attr;

	context = open_first();
	other = open_first();
	pd = ibv_alloc_pd(context);
	other_pd = ibv_alloc_pd(other);
	cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	other_cq = ibv_create_cq(other, 64, NULL, NULL, 0);
	NEED(pd && other_pd && cq && other_cq);
	mr = ibv_reg_mr(pd, memory, sizeof(memory), all);
	attr = qp_attributes();
	qp = ibv_create_qp(pd, &attr);
	attr = qp_attributes();
	peer = ibv_create_qp(pd, &attr);
	NEED(mr && qp && peer);
	connect_both(qp, peer);
	test_srq_ignores_receive_sizes();
	test_srq_limit_and_depth();
	test_too_many_elements();
	test_objects_of_another_context();
	test_address_handle_of_another_context();
	test_errors(argc > 1 && strcmp(argv[1], "roce") == 0);
	CODE(0, ibv_destroy_qp(qp));
	CODE(0, ibv_destroy_qp(peer));
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_destroy_cq(cq));
	CODE(0, ibv_destroy_cq(other_cq));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_dealloc_pd(other_pd));
	CODE(0, ibv_close_device(context));
	CODE(0, ibv_close_device(other));
	return result();
}
