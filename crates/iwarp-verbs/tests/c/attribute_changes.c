/* Tests of attributes that change after creation, alone and together with others, and of flags in
 * the second request of a list. The argument is the face of the devices. */
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdint.h>
#include <unistd.h>

#include "check.h"

enum { LENGTH = 4096, TIMEOUT_MS = 20000, QKEY = 0x1111 };

static const int INIT = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
static const int RTR = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
	IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
static const int RTS = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
	IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
static const int LOCAL = IBV_ACCESS_LOCAL_WRITE, REMOTE = IBV_ACCESS_REMOTE_WRITE |
	IBV_ACCESS_REMOTE_READ;

struct end {
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static union ibv_gid gid;
static char buffer[LENGTH] __attribute__((aligned(LENGTH)));

static void create_end(struct end *e)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = REMOTE };
	struct ibv_qp_init_attr_ex init = {
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1,
			.max_inline_data = 64 },
		.qp_type = IBV_QPT_RC,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_READ,
		.pd = pd, };

	e->channel = ibv_create_comp_channel(context);
	e->cq = ibv_create_cq(context, 32, e, e->channel, 0);
	NEED(e->channel && e->cq);
	init.send_cq = init.recv_cq = e->cq;
	NEED((e->qp = ibv_create_qp_ex(context, &init)));
	NEED(ibv_modify_qp(e->qp, &attr, INIT) == 0);
}

static void destroy_end(struct end *e)
{
	CODE(0, ibv_destroy_qp(e->qp));
	CODE(0, ibv_destroy_cq(e->cq));
	CODE(0, ibv_destroy_comp_channel(e->channel));
}

static void move_to_rts(struct end *e, const struct end *peer)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .dest_qp_num = peer->qp->qp_num,
		.path_mtu = IBV_MTU_1024, .max_dest_rd_atomic = 1, .min_rnr_timer = 12 };

	attr.ah_attr.is_global = 1;
	attr.ah_attr.port_num = 1;
	attr.ah_attr.grh.dgid = gid;
	NEED(ibv_modify_qp(e->qp, &attr, RTR) == 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7,
		.rnr_retry = 7, .max_rd_atomic = 1 };
	NEED(ibv_modify_qp(e->qp, &attr, RTS) == 0);
}

static struct ibv_qp_attr query(struct ibv_qp *qp)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	NEED(ibv_query_qp(qp, &attr, -1, &init) == 0);
	return attr;
}

static void receive(struct end *e)
{
	struct ibv_sge sge = { (uintptr_t)buffer, LENGTH, mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	NEED(ibv_post_recv(e->qp, &wr, &bad) == 0);
}

static struct ibv_wc next_completion(struct end *e)
{
	struct ibv_wc wc;
	int attempts;

	for (attempts = TIMEOUT_MS; attempts > 0; attempts--) {
		int n = ibv_poll_cq(e->cq, 1, &wc);

		NEED(n >= 0);
		if (n)
			return wc;
		usleep(1000);
	}
	NEED(!"no completion before the timeout");
	exit(2);
}

static int took_event(struct end *e)
{
	struct pollfd fd = { .fd = e->channel->fd, .events = POLLIN };
	struct ibv_cq *cq;
	void *own;

	if (poll(&fd, 1, 0) != 1)
		return 0;
	NEED(ibv_get_cq_event(e->channel, &cq, &own) == 0);
	ibv_ack_cq_events(cq, 1);
	return 1;
}

/* Each combination of flags of ibv_rereg_mr changes only the selected properties. A region can be
 * imported only into its own domain. */
static void test_reregistration(void)
{
	struct ibv_pd *other = ibv_alloc_pd(context);
	struct ibv_sge sge = { .length = 64 };
	int flags;

	NEED(other);
	for (flags = 1; flags < 8; flags++) {
		struct ibv_mr *region = ibv_reg_mr(pd, buffer, LENGTH, LOCAL), *imported;
		char *start = flags & IBV_REREG_MR_CHANGE_TRANSLATION ? buffer + 64 : buffer;
		struct ibv_pd *now = flags & IBV_REREG_MR_CHANGE_PD ? other : pd;
		int writable = !(flags & IBV_REREG_MR_CHANGE_ACCESS);

		NEED(region);
		CODE(0, ibv_rereg_mr(region, flags, other, buffer + 64, 128, 0));
		CHECK(region->pd == now && region->addr == start);
		CHECK(region->length == (start == buffer ? LENGTH : 128));
		IS_NULL(EINVAL, ibv_import_mr(now == pd ? other : pd, region->handle));
		imported = ibv_import_mr(now, region->handle);
		CHECK(imported && imported->lkey == region->lkey && imported->length == region->length);
		if (imported)
			ibv_unimport_mr(imported);
		sge.addr = (uintptr_t)start;
		sge.lkey = region->lkey;
		CODE(writable ? 0 : EFAULT, ibv_advise_mr(now, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, 0, &sge, 1));
		CODE(IBV_REREG_MR_ERR_INPUT, ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0,
			LOCAL | IBV_ACCESS_ON_DEMAND));
		CODE(0, ibv_dereg_mr(region));
	}
	CODE(0, ibv_dealloc_pd(other));
}

/* A completion queue keeps its channel and its parent domain in use. ibv_resize_cq updates cqe. */
static void test_queue_parents(void)
{
	int with;

	for (with = 0; with < 4; with++) {
		struct ibv_pd *below = ibv_alloc_pd(context), *parent = NULL;
		struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
		struct ibv_cq_init_attr_ex attr = { .cqe = 4, .channel = with & 1 ? channel : NULL };
		struct ibv_parent_domain_init_attr domain = { .pd = below };
		struct ibv_cq_ex *cq;
		int size;

		NEED(below && channel && (parent = ibv_alloc_parent_domain(context, &domain)));
		attr.comp_mask = with & 2 ? IBV_CQ_INIT_ATTR_MASK_PD : 0;
		attr.parent_domain = with & 2 ? parent : NULL;
		NEED((cq = ibv_create_cq_ex(context, &attr)));
		CODE(with & 1, channel->refcnt);
		if (with & 1)
			CODE(EBUSY, ibv_destroy_comp_channel(channel));
		if (with & 2)
			CODE(EBUSY, ibv_dealloc_pd(parent));
		size = cq->cqe;
		CODE(0, ibv_resize_cq(ibv_cq_ex_to_cq(cq), 4 * size));
		CHECK(cq->cqe >= 4 * size);
		CODE(0, ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
		CODE(0, channel->refcnt);
		CODE(0, ibv_destroy_comp_channel(channel));
		CODE(0, ibv_dealloc_pd(parent));
		CODE(0, ibv_dealloc_pd(below));
	}
}

/* A region keeps its device memory in use, at any offset. */
static void test_device_memory_regions(void)
{
	struct ibv_alloc_dm_attr attr = { .length = 256 };
	uint64_t offset;

	for (offset = 0; offset < 256; offset += 64) {
		struct ibv_dm *dm = ibv_alloc_dm(context, &attr);
		struct ibv_mr *region;

		NEED(dm && (region = ibv_reg_dm_mr(pd, dm, offset, 64, IBV_ACCESS_ZERO_BASED | LOCAL)));
		CODE(EBUSY, ibv_free_dm(dm));
		CODE(0, ibv_dereg_mr(region));
		CODE(0, ibv_free_dm(dm));
	}
}

/* A change with an invalid attribute fails and changes none of the valid attributes. */
static void test_refused_change(struct end *e)
{
	struct ibv_qp_attr wrong = { .qp_state = IBV_QPS_RTS, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_READ,
		.timeout = 40, .retry_cnt = 3, .rnr_retry = 2, .sq_psn = 77 }, before = query(e->qp), after;

	CHECK(ibv_modify_qp(e->qp, &wrong, RTS | IBV_QP_ACCESS_FLAGS) != 0);
	after = query(e->qp);
	CODE(before.qp_state, after.qp_state);
	CODE(before.cur_qp_state, after.cur_qp_state);
	CODE(before.timeout, after.timeout);
	CODE(before.retry_cnt, after.retry_cnt);
	CODE(before.rnr_retry, after.rnr_retry);
	CODE((int)before.sq_psn, (int)after.sq_psn);
	CODE((int)before.qp_access_flags, (int)after.qp_access_flags);
}

static void write_to(struct end *from, enum ibv_wc_status want)
{
	struct ibv_sge sge = { (uintptr_t)buffer, 8, mr->lkey };
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
		.sg_list = &sge, .num_sge = 1 }, *bad;

	wr.wr.rdma.remote_addr = (uintptr_t)buffer + 64;
	wr.wr.rdma.rkey = mr->rkey;
	NEED(ibv_post_send(from->qp, &wr, &bad) == 0);
	CODE(want, next_completion(from).status);
}

static void test_changes_in_rts(struct end *a, struct end *b)
{
	struct ibv_qp_attr attr = { .min_rnr_timer = 7, .qp_access_flags = REMOTE };

	write_to(a, IBV_WC_SUCCESS);
	CODE(0, ibv_modify_qp(b->qp, &attr, IBV_QP_MIN_RNR_TIMER));
	CODE(7, query(b->qp).min_rnr_timer);
	CODE(IBV_QPS_RTS, query(b->qp).cur_qp_state);
	attr.qp_access_flags = 0;
	CODE(0, ibv_modify_qp(b->qp, &attr, IBV_QP_ACCESS_FLAGS));
	CODE(0, (int)query(b->qp).qp_access_flags);
	write_to(a, IBV_WC_REM_ACCESS_ERR);
}

/* Inline data and the solicited flag work in the second of two requests: alone and together, with
 * ibv_post_send and with ibv_wr_*. */
static void test_request_flags(struct end *a, struct end *b)
{
	int bits;

	for (bits = 0; bits < 8; bits++) {
		int is_inline = bits & 1, solicited = bits & 2, extended = bits & 4;
		struct ibv_sge sge = { (uintptr_t)buffer, 8, mr->lkey };
		unsigned int flags = IBV_SEND_SIGNALED | (solicited ? IBV_SEND_SOLICITED : 0);
		struct ibv_send_wr second = { .wr_id = 2, .opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = 1,
			.send_flags = flags | (is_inline ? IBV_SEND_INLINE : 0) };
		struct ibv_send_wr first = { .wr_id = 1, .next = &second, .opcode = IBV_WR_SEND }, *bad;
		struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(a->qp);

		NEED(qp);
		receive(b);
		receive(b);
		NEED(ibv_req_notify_cq(b->cq, 1) == 0);
		if (extended) {
			ibv_wr_start(qp);
			qp->wr_id = 1;
			qp->wr_flags = 0;
			ibv_wr_send(qp);
			qp->wr_id = 2;
			qp->wr_flags = flags;
			ibv_wr_send(qp);
			if (is_inline)
				ibv_wr_set_inline_data(qp, buffer, 8);
			else
				ibv_wr_set_sge(qp, mr->lkey, (uintptr_t)buffer, 8);
			CODE(0, ibv_wr_complete(qp));
		} else {
			CODE(0, ibv_post_send(a->qp, &first, &bad));
		}
		CODE(2, (int)next_completion(a).wr_id);
		CODE(0, (int)next_completion(b).byte_len);
		CODE(8, (int)next_completion(b).byte_len);
		CODE(solicited ? 1 : 0, took_event(b));
	}
}

/* A fenced Send contains the data of the Read before it, with ibv_post_send and with ibv_wr_*. */
static void test_fence(struct end *a, struct end *b)
{
	char *sink = buffer + 128, *source = buffer + 256, *arrival = buffer;
	int extended;

	for (extended = 0; extended < 2; extended++) {
		struct ibv_sge sge = { (uintptr_t)sink, 8, mr->lkey };
		struct ibv_send_wr send = { .wr_id = 2, .opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = 1,
			.send_flags = IBV_SEND_SIGNALED | IBV_SEND_FENCE };
		struct ibv_send_wr read = { .next = &send, .opcode = IBV_WR_RDMA_READ, .sg_list = &sge,
			.num_sge = 1 }, *bad;
		struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(a->qp);

		memcpy(source, "brought", 8);
		memset(sink, 0, 8);
		receive(b);
		if (extended) {
			ibv_wr_start(qp);
			qp->wr_id = 1;
			qp->wr_flags = 0;
			ibv_wr_rdma_read(qp, mr->rkey, (uintptr_t)source);
			ibv_wr_set_sge(qp, mr->lkey, (uintptr_t)sink, 8);
			qp->wr_id = 2;
			qp->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_FENCE;
			ibv_wr_send(qp);
			ibv_wr_set_sge(qp, mr->lkey, (uintptr_t)sink, 8);
			CODE(0, ibv_wr_complete(qp));
		} else {
			read.wr.rdma.remote_addr = (uintptr_t)source;
			read.wr.rdma.rkey = mr->rkey;
			CODE(0, ibv_post_send(a->qp, &read, &bad));
		}
		CODE(8, (int)next_completion(b).byte_len);
		CODE(2, (int)next_completion(a).wr_id);
		CHECK(!memcmp(arrival, "brought", 8));
	}
}

/* A type 1 window has a new key after each bind, even if the key wraps around. */
static void test_window_keys(struct end *e)
{
	struct ibv_mr *region = ibv_reg_mr(pd, buffer, LENGTH, LOCAL | REMOTE | IBV_ACCESS_MW_BIND);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	struct ibv_mw_bind bind = { .bind_info = { region, (uintptr_t)buffer, 64, REMOTE },
		.send_flags = IBV_SEND_SIGNALED };
	int i;

	NEED(region && mw);
	for (i = 0; i < 300; i++) {
		uint32_t before = mw->rkey;

		NEED(ibv_bind_mw(e->qp, mw, &bind) == 0);
		NEED(next_completion(e).status == IBV_WC_SUCCESS);
		NEED(mw->rkey != before && mw->rkey >> 8 == before >> 8);
	}
	CODE(0, ibv_dealloc_mw(mw));
	CODE(0, ibv_dereg_mr(region));
}

/* The Q_Key of a datagram queue pair can change alone, and together with the state. */
static void test_datagram_qkey(void)
{
	struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, NULL, 0);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .cap = { 1, 1, 1, 1, 0 },
		.qp_type = IBV_QPT_UD };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	int key = QKEY, state;

	NEED(cq && qp && ibv_modify_qp(qp, &attr, (INIT & ~IBV_QP_ACCESS_FLAGS) | IBV_QP_QKEY) == 0);
	for (state = IBV_QPS_INIT; state <= IBV_QPS_RTS; state++) {
		attr.qp_state = state;
		attr.qkey = ++key;
		if (state != IBV_QPS_INIT)
			CODE(0, ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_QKEY |
				(state == IBV_QPS_RTS ? IBV_QP_SQ_PSN : 0)));
		else
			CODE(0, ibv_modify_qp(qp, &attr, IBV_QP_QKEY));
		CODE(key, (int)query(qp).qkey);
	}
	attr.qkey = ++key;
	CODE(0, ibv_modify_qp(qp, &attr, IBV_QP_QKEY));
	CODE(key, (int)query(qp).qkey);
	CODE(0, ibv_destroy_qp(qp));
	CODE(0, ibv_destroy_cq(cq));
}

int main(void)
{
	int n, i;
	struct ibv_device **devices = ibv_get_device_list(&n);
	struct end a, b;

	for (i = 0; i < n && !context; i++) {
		NEED((context = ibv_open_device(devices[i])));
		NEED(ibv_query_gid(context, 1, 0, &gid) == 0);
	}
	NEED(context && (pd = ibv_alloc_pd(context)));
	NEED((mr = ibv_reg_mr(pd, buffer, LENGTH, LOCAL | REMOTE)));
	test_reregistration();
	test_queue_parents();
	test_device_memory_regions();
	test_datagram_qkey();
	create_end(&a);
	create_end(&b);
	move_to_rts(&a, &b);
	move_to_rts(&b, &a);
	test_refused_change(&a);
	test_request_flags(&a, &b);
	test_fence(&a, &b);
	test_window_keys(&a);
	test_changes_in_rts(&a, &b);
	destroy_end(&a);
	destroy_end(&b);
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	ibv_free_device_list(devices);
	return result();
}
