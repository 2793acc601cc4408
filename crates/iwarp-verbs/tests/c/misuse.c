/* Tests of wrong calls of verbs. Each call returns the error of the manual page, and none
 * crashes. */
#include <infiniband/verbs.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static union ibv_gid gid;
static char buffer[8192];
static size_t page;

static const int LOCAL = IBV_ACCESS_LOCAL_WRITE;
static const int ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		       IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;

static struct ibv_qp_init_attr qp_attributes(void)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 2, .max_recv_sge = 2 },
		.qp_type = IBV_QPT_RC, };
	return attr;
}

static struct ibv_qp *create_qp(void)
{
	struct ibv_qp_init_attr attr = qp_attributes();
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);

	NEED(qp);
	return qp;
}

static void test_bad_memory(void)
{
	char *pages = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *high = (char *)(uintptr_t)0xffff800000000000;
	struct ibv_mr *mr;

	NEED(pages != MAP_FAILED);
	NEED(munmap(pages + page, page) == 0);
	NEED(mprotect(pages + 2 * page, page, PROT_READ) == 0);
	NEED(mprotect(pages + 3 * page, page, PROT_NONE) == 0);
	/* A null pointer, a kernel address, an unmapped page, a range with an unmapped page, and ranges
	 * beyond the end of the address space. */
	IS_NULL(EFAULT, ibv_reg_mr(pd, NULL, 4096, LOCAL));
	IS_NULL(EFAULT, ibv_reg_mr(pd, high, 4096, LOCAL));
	IS_NULL(EFAULT, ibv_reg_mr(pd, pages + page, page, LOCAL));
	IS_NULL(EFAULT, ibv_reg_mr(pd, pages, page + 1, LOCAL));
	IS_NULL(EINVAL, ibv_reg_mr(pd, pages, SIZE_MAX, LOCAL));
	IS_NULL(EINVAL, ibv_reg_mr(pd, pages, 0, LOCAL));
	IS_NULL(EFAULT, ibv_reg_mr(pd, pages, SIZE_MAX / 2, LOCAL));
	/* Read-only memory, and inaccessible memory. */
	IS_NULL(EFAULT, ibv_reg_mr(pd, pages + 2 * page, page, LOCAL));
	IS_NULL(EFAULT, ibv_reg_mr(pd, pages + 3 * page, page, 0));
	mr = ibv_reg_mr(pd, pages + 2 * page, page, IBV_ACCESS_REMOTE_READ);
	CHECK(mr);
	CODE(0, ibv_dereg_mr(mr));
	/* The last address of the region exceeds 64 bits. */
	IS_NULL(EINVAL, ibv_reg_mr_iova(pd, buffer, 4096, UINT64_MAX - 4000, LOCAL));
	NEED(munmap(pages, 4 * page) == 0);
}

static void test_bad_access_flags(void)
{
	struct ibv_pd *other = ibv_alloc_pd(context);
	struct ibv_mr *mr;
	uint32_t key;

	/* Remote write and remote atomic access need local write access. */
	IS_NULL(EINVAL, ibv_reg_mr(pd, buffer, 64, IBV_ACCESS_REMOTE_WRITE));
	IS_NULL(EINVAL, ibv_reg_mr(pd, buffer, 64, IBV_ACCESS_REMOTE_ATOMIC));
	IS_NULL(EINVAL, ibv_reg_mr(pd, buffer, 64, 1 << 15));
	IS_NULL(EINVAL, ibv_reg_mr(NULL, buffer, 64, LOCAL));
	mr = ibv_reg_mr(pd, buffer, 64, ALL);
	NEED(mr && other);
	key = mr->rkey;
	CODE(IBV_REREG_MR_ERR_INPUT, ibv_rereg_mr(mr, 0, pd, buffer, 64, LOCAL));
	CODE(IBV_REREG_MR_ERR_INPUT, ibv_rereg_mr(mr, 1 << 9, pd, buffer, 64, LOCAL));
	CODE(IBV_REREG_MR_ERR_INPUT, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 2));
	CODE(IBV_REREG_MR_ERR_INPUT, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, NULL, NULL, 0, 0));
	CODE(IBV_REREG_MR_ERR_INPUT, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, NULL, 64, 0));
	CODE(IBV_REREG_MR_ERR_INPUT,
	     ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, (void *)4096, 64, 0));
	CHECK(mr->rkey == key && mr->addr == buffer && mr->length == 64 && mr->pd == pd);
	CODE(0, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, other, NULL, 0, 0));
	CODE(EBUSY, ibv_dealloc_pd(other));
	CODE(0, ibv_dereg_mr(mr));
	CODE(EINVAL, ibv_dereg_mr(mr));
	CODE(0, ibv_dealloc_pd(other));
}

/* A region can only be imported into its own protection domain. */
static void test_bad_imports(void)
{
	struct ibv_pd *other = ibv_alloc_pd(context);
	struct ibv_mr *mr = ibv_reg_mr(pd, buffer, 64, ALL), *imported;

	NEED(mr && other);
	IS_NULL(EINVAL, ibv_import_mr(other, mr->handle));
	IS_NULL(EINVAL, ibv_import_mr(pd, mr->handle + 1));
	IS_NULL(EINVAL, ibv_import_mr(NULL, mr->handle));
	imported = ibv_import_mr(pd, mr->handle);
	NEED(imported);
	CHECK(imported->pd == pd && imported->rkey == mr->rkey && imported->length == 64);
	ibv_unimport_mr(imported);
	CODE(0, ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, other, NULL, 0, 0));
	IS_NULL(EINVAL, ibv_import_mr(pd, mr->handle));
	imported = ibv_import_mr(other, mr->handle);
	CHECK(imported);
	ibv_unimport_mr(imported);
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_dealloc_pd(other));
}

/* Destroys objects in the wrong order or twice. The test does not destroy an object twice if an
 * inline function of the headers would read the freed object. */
static void test_wrong_destruction_of_queues(void)
{
	struct ibv_pd *p = ibv_alloc_pd(context);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq *q = ibv_create_cq(context, 16, NULL, channel, 0);
	struct ibv_cq *r = ibv_create_cq(context, 16, NULL, channel, 0);
	struct ibv_srq_init_attr srq_attr = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(p, &srq_attr);
	struct ibv_qp_init_attr attr = qp_attributes();
	struct ibv_qp *qp;

	NEED(p && channel && q && r && srq);
	CODE(EBUSY, ibv_destroy_comp_channel(channel));
	CODE(EBUSY, ibv_dealloc_pd(p));
	attr.send_cq = q;
	attr.recv_cq = r;
	attr.srq = srq;
	qp = ibv_create_qp(p, &attr);
	NEED(qp);
	CODE(EBUSY, ibv_destroy_srq(srq));
	CODE(EBUSY, ibv_destroy_cq(q));
	CODE(EBUSY, ibv_destroy_cq(r));
	CODE(0, ibv_destroy_qp(qp));
	CODE(EINVAL, ibv_destroy_qp(qp));
	CODE(0, ibv_destroy_srq(srq));
	CODE(EINVAL, ibv_destroy_srq(srq));
	CODE(0, ibv_dealloc_pd(p));
	CODE(EINVAL, ibv_dealloc_pd(p));
	CODE(0, ibv_destroy_cq(q));
	CODE(EINVAL, ibv_destroy_cq(q));
	CODE(EBUSY, ibv_destroy_comp_channel(channel));
	CODE(0, ibv_destroy_cq(r));
	CODE(0, ibv_destroy_comp_channel(channel));
	CODE(EINVAL, ibv_destroy_comp_channel(channel));
}

/* Destroys a protection domain before what belongs to it. */
static void test_wrong_destruction_in_domain(void)
{
	struct ibv_pd *p = ibv_alloc_pd(context);
	struct ibv_ah_attr ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid } };
	struct ibv_td_init_attr td_attr = { 0 };
	struct ibv_td *td = ibv_alloc_td(context, &td_attr);
	struct ibv_parent_domain_init_attr domain_attr = { .pd = p, .td = td };
	struct ibv_alloc_dm_attr dm_attr = { .length = 4096 };
	struct ibv_pd *domain;
	struct ibv_mr *mr;
	struct ibv_mw *mw;
	struct ibv_ah *ah;
	struct ibv_dm *dm;

	NEED(p && td);
	mr = ibv_reg_mr(p, buffer, 4096, LOCAL);
	CODE(EBUSY, ibv_dealloc_pd(p));
	CODE(0, ibv_dereg_mr(mr));
	mw = ibv_alloc_mw(p, IBV_MW_TYPE_2);
	CODE(EBUSY, ibv_dealloc_pd(p));
	CODE(0, ibv_dealloc_mw(mw));
	ah = ibv_create_ah(p, &ah_attr);
	CODE(EBUSY, ibv_dealloc_pd(p));
	CODE(0, ibv_destroy_ah(ah));
	CODE(EINVAL, ibv_destroy_ah(ah));
	domain_attr.comp_mask = 1 << 3;
	IS_NULL(EOPNOTSUPP, ibv_alloc_parent_domain(context, &domain_attr));
	/* Bit 2 exists only in later headers. It allows memory that a confidential guest shares. */
	domain_attr.comp_mask = 1 << 2;
	domain = ibv_alloc_parent_domain(context, &domain_attr);
	NEED(domain);
	CODE(EBUSY, ibv_dealloc_pd(p));
	CODE(EBUSY, ibv_dealloc_td(td));
	CODE(0, ibv_dealloc_pd(domain));
	CODE(0, ibv_dealloc_td(td));
	dm = ibv_alloc_dm(context, &dm_attr);
	NEED(dm);
	mr = ibv_reg_dm_mr(p, dm, 0, 4096, IBV_ACCESS_ZERO_BASED | LOCAL);
	NEED(mr);
	CODE(EBUSY, ibv_free_dm(dm));
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_free_dm(dm));
	CODE(0, ibv_dealloc_pd(p));
}

static void test_bad_creation(void)
{
	struct ibv_qp_init_attr attr = qp_attributes();
	struct ibv_qp_init_attr_ex ex = { 0 };
	struct ibv_srq_init_attr srq_attr = { .attr = { .max_wr = 0x7fffffff, .max_sge = 1 } };
	struct ibv_ah_attr ah_attr = { .is_global = 1, .port_num = 1 };
	struct ibv_alloc_dm_attr dm_attr = { .length = 0 };
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 16, .wc_flags = 1ull << 40 }, both = { .cqe = 16,
		.wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_TM_INFO };

	/* A completion cannot contain both a timestamp and tag information. */
	IS_NULL(EOPNOTSUPP, ibv_create_cq_ex(context, &both));
	IS_NULL(EINVAL, ibv_create_cq(context, 0, NULL, NULL, 0));
	IS_NULL(EINVAL, ibv_create_cq(context, -1, NULL, NULL, 0));
	IS_NULL(EINVAL, ibv_create_cq(context, 0x7fffffff, NULL, NULL, 0));
	IS_NULL(EINVAL, ibv_create_cq(context, 16, NULL, NULL, 99));
	IS_NULL(EOPNOTSUPP, ibv_create_cq_ex(context, &cq_attr));
	IS_NULL(EINVAL, ibv_create_qp(pd, NULL));
	IS_NULL(EINVAL, ibv_create_qp(NULL, &attr));
	attr.qp_type = IBV_QPT_RAW_PACKET;
	IS_NULL(EOPNOTSUPP, ibv_create_qp(pd, &attr));
	attr = qp_attributes();
	attr.cap.max_send_wr = 0x7fffffff;
	IS_NULL(EINVAL, ibv_create_qp(pd, &attr));
	attr = qp_attributes();
	attr.cap.max_recv_sge = 0xffff;
	IS_NULL(EINVAL, ibv_create_qp(pd, &attr));
	attr = qp_attributes();
	attr.cap.max_inline_data = 1 << 30;
	IS_NULL(EINVAL, ibv_create_qp(pd, &attr));
	attr = qp_attributes();
	attr.send_cq = NULL;
	IS_NULL(EINVAL, ibv_create_qp(pd, &attr));
	ex.send_cq = ex.recv_cq = cq;
	ex.qp_type = IBV_QPT_RC;
	IS_NULL(EINVAL, ibv_create_qp_ex(context, &ex));
	ex.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	ex.pd = pd;
	ex.send_ops_flags = IBV_QP_EX_WITH_TSO;
	IS_NULL(EOPNOTSUPP, ibv_create_qp_ex(context, &ex));
	IS_NULL(EINVAL, ibv_create_srq(pd, &srq_attr));
	IS_NULL(EINVAL, ibv_create_srq(pd, NULL));
	IS_NULL(EINVAL, ibv_create_ah(pd, &ah_attr));
	IS_NULL(EINVAL, ibv_alloc_dm(context, &dm_attr));
	IS_NULL(EINVAL, ibv_alloc_mw(pd, 7));
}

static void test_bad_queries(void)
{
	struct ibv_port_attr port;
	struct ibv_gid_entry entry;
	uint16_t pkey;
	union ibv_gid none;

	CODE(EINVAL, ibv_query_port(context, 0, &port));
	CODE(EINVAL, ibv_query_port(context, 2, &port));
	MINUS_ONE(EINVAL, ibv_query_gid(context, 1, 1000, &none));
	MINUS_ONE(EINVAL, ibv_query_gid(context, 9, 0, &none));
	MINUS_ONE(EINVAL, ibv_query_gid(context, 1, -1, &none));
	NEED(ibv_query_port(context, 1, &port) == 0);
	CODE(ENODATA, ibv_query_gid_ex(context, 1, port.gid_tbl_len - 1, &entry, 0));
	CODE(EINVAL, ibv_query_gid_ex(context, 1, port.gid_tbl_len, &entry, 0));
	CODE(EINVAL, ibv_query_gid_ex(context, 1, 0, &entry, 1));
	MINUS_ONE(EINVAL, ibv_query_pkey(context, 1, 5, &pkey));
	CODE(EINVAL, ibv_query_device(context, NULL));
}

static int modify(struct ibv_qp *qp, int mask, struct ibv_qp_attr attr)
{
	return ibv_modify_qp(qp, &attr, mask);
}

/* Moves a queue pair to RTS, with a peer that does not exist. */
static void move_to_rts_without_peer(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .dest_qp_num = qp->qp_num ^ 0x10000 };

	attr.ah_attr.is_global = 1;
	attr.ah_attr.port_num = 1;
	attr.ah_attr.grh.dgid = gid;
	NEED(modify(qp, IBV_QP_STATE, (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT }) == 0);
	NEED(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN) == 0);
	NEED(modify(qp, IBV_QP_STATE, (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS }) == 0);
}

static void test_bad_modification(void)
{
	struct ibv_qp *qp = create_qp();
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct ibv_srq_init_attr srq_attr = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &srq_attr);
	struct ibv_ece vendor = { .vendor_id = 1 }, unknown = { .comp_mask = 1 };

	NEED(srq);
	CODE(EOPNOTSUPP, ibv_set_ece(qp, &vendor));
	CODE(EINVAL, ibv_set_ece(qp, &unknown));
	CODE(EINVAL, ibv_modify_qp(qp, NULL, IBV_QP_STATE));
	CODE(EINVAL, ibv_modify_qp(NULL, &attr, IBV_QP_STATE));
	CODE(EOPNOTSUPP, modify(qp, 1 << 30, (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT }));
	CODE(EINVAL, modify(qp, IBV_QP_STATE, (struct ibv_qp_attr){ .qp_state = 99 }));
	CODE(EINVAL, modify(qp, IBV_QP_STATE, (struct ibv_qp_attr){ .qp_state = IBV_QPS_SQD }));
	CODE(EINVAL, modify(qp, IBV_QP_PORT, (struct ibv_qp_attr){ .port_num = 2 }));
	CODE(EINVAL, modify(qp, IBV_QP_PKEY_INDEX, (struct ibv_qp_attr){ .pkey_index = 3 }));
	CODE(EINVAL, modify(qp, IBV_QP_PATH_MTU, (struct ibv_qp_attr){ .path_mtu = 9 }));
	CODE(EINVAL, modify(qp, IBV_QP_MAX_QP_RD_ATOMIC, (struct ibv_qp_attr){ .max_rd_atomic = 255 }));
	CODE(EINVAL, modify(qp, IBV_QP_MAX_DEST_RD_ATOMIC,
		(struct ibv_qp_attr){ .max_dest_rd_atomic = 255 }));
	CODE(EINVAL, modify(qp, IBV_QP_CUR_STATE | IBV_QP_STATE,
			    (struct ibv_qp_attr){ .cur_qp_state = IBV_QPS_RTS, .qp_state = IBV_QPS_INIT }));
	/* Entry 3 of the GID table is empty, and no host has the zero GID. */
	CODE(0, modify(qp, IBV_QP_STATE, (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT }));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .dest_qp_num = 77 };
	attr.ah_attr.is_global = 1;
	attr.ah_attr.port_num = 1;
	attr.ah_attr.grh.dgid = gid;
	attr.ah_attr.grh.sgid_index = 3;
	CODE(EINVAL, ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN));
	attr.ah_attr.grh.sgid_index = 0;
	memset(&attr.ah_attr.grh.dgid, 0, sizeof(attr.ah_attr.grh.dgid));
	CODE(EINVAL, ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN));
	CODE(0, ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
	CHECK(attr.qp_state == IBV_QPS_INIT);
	CODE(0, modify(qp, IBV_QP_STATE, (struct ibv_qp_attr){ .qp_state = IBV_QPS_ERR }));
	CODE(EINVAL, modify(qp, IBV_QP_STATE, (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT }));
	CODE(EINVAL, modify(qp, IBV_QP_STATE, (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS }));
	CODE(0, modify(qp, IBV_QP_STATE, (struct ibv_qp_attr){ .qp_state = IBV_QPS_RESET }));
	CODE(EINVAL, modify(qp, IBV_QP_STATE, (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR }));
	CODE(0, ibv_destroy_qp(qp));
	CODE(EINVAL, ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	CODE(EINVAL, ibv_modify_srq(srq, &srq_attr.attr, 1 << 5));
	srq_attr.attr.srq_limit = 1000;
	CODE(EINVAL, ibv_modify_srq(srq, &srq_attr.attr, IBV_SRQ_LIMIT));
	CODE(0, ibv_destroy_srq(srq));
	CODE(EINVAL, ibv_resize_cq(cq, 0));
	CODE(EINVAL, ibv_resize_cq(cq, 0x7fffffff));
	CODE(EINVAL, ibv_resize_cq(NULL, 16));
	CHECK(ibv_poll_cq(cq, -1, NULL) < 0);
	CODE(0, ibv_poll_cq(cq, 0, NULL));
}

/* build_chain fills these with a chain of `n` requests, each with `sges` elements of `length`
 * bytes. */
#define CHAIN_MAX 300
static struct ibv_sge elements[64];
static struct ibv_send_wr sends[CHAIN_MAX];
static struct ibv_recv_wr recvs[CHAIN_MAX];

static void build_chain(struct ibv_mr *mr, int n, int sges, uint32_t length)
{
	int i;

	memset(sends, 0, sizeof(sends));
	memset(recvs, 0, sizeof(recvs));
	for (i = 0; i < 64; i++)
		elements[i] = (struct ibv_sge){ (uintptr_t)mr->addr, length, mr->lkey };
	for (i = 0; i < n; i++) {
		sends[i].wr_id = recvs[i].wr_id = i;
		sends[i].sg_list = recvs[i].sg_list = elements;
		sends[i].num_sge = recvs[i].num_sge = sges;
		sends[i].opcode = IBV_WR_SEND;
		sends[i].send_flags = IBV_SEND_SIGNALED;
		sends[i].next = i + 1 < n ? &sends[i + 1] : NULL;
		recvs[i].next = i + 1 < n ? &recvs[i + 1] : NULL;
	}
}

static void drain(void)
{
	struct ibv_wc wc[16];

	while (ibv_poll_cq(cq, 16, wc) > 0)
		;
}

static void test_bad_receives(void)
{
	struct ibv_qp_init_attr attr = qp_attributes();
	struct ibv_srq_init_attr srq_attr = { .attr = { .max_wr = 40, .max_sge = 2 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &srq_attr);
	struct ibv_mr *mr = ibv_reg_mr(pd, buffer, sizeof(buffer), ALL);
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);
	struct ibv_recv_wr *bad = NULL;
	int most = attr.cap.max_recv_wr;

	NEED(mr && qp && srq && most + 3 < CHAIN_MAX);
	/* The requests that fit are posted. `bad` is the first request that does not fit. */
	build_chain(mr, most + 3, 1, 64);
	CODE(ENOMEM, ibv_post_recv(qp, recvs, &bad));
	CHECK(bad == &recvs[most]);
	build_chain(mr, 1, 1, 64);
	CODE(ENOMEM, ibv_post_recv(qp, recvs, &bad));
	CHECK(bad == recvs);
	CODE(0, modify(qp, IBV_QP_STATE, (struct ibv_qp_attr){ .qp_state = IBV_QPS_RESET }));
	CODE(EINVAL, ibv_post_recv(qp, recvs, &bad));
	CHECK(bad == recvs);
	CODE(0, modify(qp, IBV_QP_STATE, (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT }));
	build_chain(mr, 3, 1, 64);
	recvs[1].num_sge = attr.cap.max_recv_sge + 1;
	CODE(EINVAL, ibv_post_recv(qp, recvs, &bad));
	CHECK(bad == &recvs[1]);
	recvs[1].num_sge = 1 << 20;
	CODE(EINVAL, ibv_post_recv(qp, &recvs[1], &bad));
	CHECK(bad == &recvs[1]);
	recvs[1].num_sge = -1;
	CODE(EINVAL, ibv_post_recv(qp, &recvs[1], &bad));
	CHECK(bad == &recvs[1]);
	CODE(0, ibv_destroy_qp(qp));
	/* A queue pair with a shared receive queue has no receive queue of its own. */
	attr = qp_attributes();
	attr.srq = srq;
	qp = ibv_create_qp(pd, &attr);
	NEED(qp);
	build_chain(mr, 1, 1, 64);
	CODE(EINVAL, ibv_post_recv(qp, recvs, &bad));
	CHECK(bad == recvs);
	most = srq_attr.attr.max_wr;
	build_chain(mr, most + 2, 1, 64);
	CODE(ENOMEM, ibv_post_srq_recv(srq, recvs, &bad));
	CHECK(bad == &recvs[most]);
	build_chain(mr, 1, srq_attr.attr.max_sge + 1, 64);
	CODE(EINVAL, ibv_post_srq_recv(srq, recvs, &bad));
	CHECK(bad == recvs);
	CODE(0, ibv_destroy_qp(qp));
	CODE(0, ibv_destroy_srq(srq));
	CODE(0, ibv_dereg_mr(mr));
	drain();
}

static void test_bad_sends(void)
{
	struct ibv_qp_init_attr attr = qp_attributes();
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);
	struct ibv_mr *mr = ibv_reg_mr(pd, buffer, sizeof(buffer), ALL);
	struct ibv_send_wr *bad = NULL;
	int most = attr.cap.max_send_wr, i;

	NEED(qp && mr && most + 3 < CHAIN_MAX);
	build_chain(mr, 1, 1, 64);
	CODE(EINVAL, ibv_post_send(qp, sends, &bad));
	CHECK(bad == sends);
	move_to_rts_without_peer(qp);
	/* The peer does not exist, so posted requests stay in the queue. Refused requests use no slots. */
	build_chain(mr, 1, attr.cap.max_send_sge + 1, 64);
	CODE(EINVAL, ibv_post_send(qp, sends, &bad));
	CHECK(bad == sends);
	build_chain(mr, 1, -1, 64);
	CODE(EINVAL, ibv_post_send(qp, sends, &bad));
	build_chain(mr, 1, 1, attr.cap.max_inline_data + 1);
	sends[0].send_flags |= IBV_SEND_INLINE;
	CODE(EINVAL, ibv_post_send(qp, sends, &bad));
	CHECK(bad == sends);
	build_chain(mr, 1, 1, 8);
	sends[0].send_flags |= IBV_SEND_INLINE;
	sends[0].opcode = IBV_WR_RDMA_READ;
	CODE(EINVAL, ibv_post_send(qp, sends, &bad));
	build_chain(mr, 1, 1, 4);
	sends[0].opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
	CODE(EINVAL, ibv_post_send(qp, sends, &bad));
	build_chain(mr, 1, 1, 64);
	sends[0].opcode = IBV_WR_TSO;
	CODE(EINVAL, ibv_post_send(qp, sends, &bad));
	sends[0].opcode = 77;
	CODE(EINVAL, ibv_post_send(qp, sends, &bad));
	sends[0].opcode = IBV_WR_BIND_MW;
	CODE(EINVAL, ibv_post_send(qp, sends, &bad));
	build_chain(mr, 3, 1, 64);
	sends[1].num_sge = attr.cap.max_send_sge + 1;
	CODE(EINVAL, ibv_post_send(qp, sends, &bad));
	CHECK(bad == &sends[1]);
	build_chain(mr, most + 2, 1, 64);
	CODE(ENOMEM, ibv_post_send(qp, sends, &bad));
	CHECK(bad == &sends[most - 1]);
	build_chain(mr, 1, 1, 64);
	CODE(ENOMEM, ibv_post_send(qp, sends, &bad));
	CHECK(bad == sends);
	/* Only the posted requests are flushed, in order. */
	CODE(0, modify(qp, IBV_QP_STATE, (struct ibv_qp_attr){ .qp_state = IBV_QPS_ERR }));
	for (i = 0; i < most; i++) {
		struct ibv_wc wc;

		CODE(1, ibv_poll_cq(cq, 1, &wc));
		CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.qp_num == qp->qp_num);
		CHECK(wc.wr_id == (uint64_t)(i == 0 ? 0 : i - 1));
	}
	{
		struct ibv_wc wc;
		CODE(0, ibv_poll_cq(cq, 1, &wc));
	}
	CODE(0, ibv_destroy_qp(qp));
	CODE(0, ibv_dereg_mr(mr));
}

/* Posts a batch of `n` Sends of `length` bytes with the extended interface. */
static int post_batch(struct ibv_qp_ex *qp, int n, size_t length, int inlined)
{
	struct ibv_mr *mr = qp->qp_base.qp_context;
	int i;

	ibv_wr_start(qp);
	for (i = 0; i < n; i++) {
		qp->wr_id = i;
		qp->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_send(qp);
		if (inlined)
			ibv_wr_set_inline_data(qp, buffer, length);
		else
			ibv_wr_set_sge(qp, mr->lkey, (uintptr_t)buffer, length);
	}
	return ibv_wr_complete(qp);
}

static void test_bad_batches(void)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, buffer, 4096, ALL);
	struct ibv_qp_init_attr_ex attr = {
		.qp_context = mr,
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 40, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC, .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = pd, .send_ops_flags = IBV_QP_EX_WITH_SEND,
	};
	struct ibv_qp *plain = ibv_create_qp_ex(context, &attr);
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(plain);
	struct ibv_wc wc;
	int most = attr.cap.max_send_wr, i;

	NEED(mr && qp && most >= 40);
	/* A batch in a state that does not allow posting, and data before a batch's first request. */
	CODE(EINVAL, post_batch(qp, 1, 64, 0));
	move_to_rts_without_peer(plain);
	ibv_wr_start(qp);
	ibv_wr_set_sge(qp, mr->lkey, (uintptr_t)buffer, 64);
	CODE(EINVAL, ibv_wr_complete(qp));
	CODE(EINVAL, post_batch(qp, 1, attr.cap.max_inline_data + 1, 1));
	ibv_wr_start(qp);
	ibv_wr_send(qp);
	ibv_wr_abort(qp);
	/* A batch of any length is posted entirely or not at all. */
	CODE(0, post_batch(qp, 20, 64, 0));
	CODE(ENOMEM, post_batch(qp, most - 20 + 1, 64, 0));
	CODE(0, post_batch(qp, most - 20, 16, 1));
	CODE(ENOMEM, post_batch(qp, 1, 64, 0));
	CODE(0, modify(plain, IBV_QP_STATE, (struct ibv_qp_attr){ .qp_state = IBV_QPS_ERR }));
	for (i = 0; i < most; i++) {
		CODE(1, ibv_poll_cq(cq, 1, &wc));
		CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == (uint64_t)(i < 20 ? i : i - 20));
	}
	CODE(0, ibv_poll_cq(cq, 1, &wc));
	CODE(0, ibv_destroy_qp(plain));
	CODE(0, ibv_dereg_mr(mr));
}

static void test_bad_windows(void)
{
	struct ibv_qp_init_attr attr = qp_attributes();
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);
	struct ibv_mr *mr = ibv_reg_mr(pd, buffer, 4096, ALL);
	struct ibv_mr *plain = ibv_reg_mr(pd, buffer, 4096, LOCAL);
	struct ibv_mw *one = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	struct ibv_mw *two = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_mw_bind bind = {
		.wr_id = 5,
		.send_flags = IBV_SEND_SIGNALED,
		.bind_info = { mr, (uintptr_t)buffer, 64, IBV_ACCESS_REMOTE_READ },
	};
	uint32_t key;

	NEED(qp && mr && plain && one && two);
	key = one->rkey;
	/* ibv_bind_mw requires a type 1 window and a queue pair in RTS. */
	CODE(EINVAL, ibv_bind_mw(qp, two, &bind));
	CODE(EINVAL, ibv_bind_mw(qp, one, &bind));
	move_to_rts_without_peer(qp);
	bind.bind_info.mr = NULL;
	CODE(EINVAL, ibv_bind_mw(qp, one, &bind));
	bind.bind_info.mr = plain;
	/* The library checks the access rights of the region only when it executes the bind. */
	CODE(0, ibv_bind_mw(qp, one, &bind));
	CHECK(one->rkey != key);
	CODE(0, ibv_dealloc_mw(two));
	CODE(0, ibv_dealloc_mw(one));
	CODE(0, ibv_destroy_qp(qp));
	CODE(0, ibv_dereg_mr(plain));
	CODE(0, ibv_dereg_mr(mr));
}

static void test_bad_advice(void)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, buffer, 4096, LOCAL | IBV_ACCESS_ON_DEMAND);
	struct ibv_mr *readable = ibv_reg_mr(pd, buffer, 4096, IBV_ACCESS_ON_DEMAND);
	struct ibv_pd *other = ibv_alloc_pd(context);
	struct ibv_mr *all;
	struct ibv_sge sge;

	NEED(mr && readable && other);
	/* The range is not completely in huge pages. */
	IS_NULL(EINVAL, ibv_reg_mr(pd, buffer, 64, LOCAL | IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB));
	sge = (struct ibv_sge){ (uintptr_t)buffer, 4096, mr->lkey };
	CODE(0, ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, 0, &sge, 1));
	CODE(EPERM, ibv_advise_mr(other, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1));
	CODE(EOPNOTSUPP, ibv_advise_mr(pd, 99, 0, &sge, 1));
	CODE(EINVAL, ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, NULL, 0));
	sge.length = 4097;
	CODE(EFAULT, ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1));
	sge = (struct ibv_sge){ (uintptr_t)buffer, 64, mr->lkey ^ 1 };
	CODE(EFAULT, ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1));
	sge.lkey = readable->lkey;
	CODE(EFAULT, ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, 0, &sge, 1));
	/* A region of the whole address space must start at address 0 and use on-demand paging. */
	IS_NULL(EINVAL, ibv_reg_mr(pd, buffer, SIZE_MAX, LOCAL | IBV_ACCESS_ON_DEMAND));
	IS_NULL(EFAULT, ibv_reg_mr(pd, NULL, SIZE_MAX, LOCAL));
	all = ibv_reg_mr(pd, NULL, SIZE_MAX, LOCAL | IBV_ACCESS_ON_DEMAND);
	NEED(all);
	sge = (struct ibv_sge){ (uintptr_t)buffer, 4096, all->lkey };
	CODE(0, ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1));
	sge.addr = 0;
	CODE(EFAULT, ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1));
	CODE(0, ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT, 0, &sge, 1));
	/* ibv_rereg_mr cannot change whether a region uses on-demand paging. */
	CODE(-1, ibv_rereg_mr(all, IBV_REREG_MR_CHANGE_ACCESS, pd, NULL, 0, LOCAL));
	CODE(0, ibv_rereg_mr(all, IBV_REREG_MR_CHANGE_ACCESS, pd, NULL, 0, IBV_ACCESS_ON_DEMAND));
	CODE(0, ibv_dereg_mr(all));
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_dereg_mr(readable));
	CODE(0, ibv_dealloc_pd(other));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	NEED(list && list[0]);
	page = sysconf(_SC_PAGESIZE);
	context = ibv_open_device(list[0]);
	NEED(context);
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 256, NULL, NULL, 0);
	NEED(pd && cq && ibv_query_gid(context, 1, 0, &gid) == 0);
	test_bad_memory();
	test_bad_access_flags();
	test_bad_imports();
	test_wrong_destruction_of_queues();
	test_wrong_destruction_in_domain();
	test_bad_creation();
	test_bad_queries();
	test_bad_modification();
	test_bad_receives();
	test_bad_sends();
	test_bad_batches();
	test_bad_windows();
	test_bad_advice();
	/* These calls succeed because no failed call has left an object. */
	CODE(0, ibv_destroy_cq(cq));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	return result();
}
