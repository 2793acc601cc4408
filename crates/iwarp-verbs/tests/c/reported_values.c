/* Tests of the values that calls report: sizes, attributes and reference counts of objects, and
 * opcodes, flags and times of completions. */
#include "check.h"

#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

enum { SIZE = 4096, DEPTH = 64, MANY = 40, PIECE = 16 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static union ibv_gid gid;

/* One end of a connection, with an extended completion queue that has all fields. */
struct end {
	struct ibv_comp_channel *channel;
	struct ibv_cq_ex *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	struct ibv_mw *mw;
	char memory[SIZE];
};

static struct end left, right;

static const enum ibv_access_flags ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
	IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;

static void create_end(struct end *e)
{
	struct ibv_cq_init_attr_ex cq = { .cqe = 4 * DEPTH, .cq_context = e,
		.wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK };
	struct ibv_qp_init_attr_ex attr = { .qp_type = IBV_QPT_RC, .qp_context = e, .pd = pd,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 2, .max_recv_sge = 1,
			.max_inline_data = 64 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_SEND |
			IBV_QP_EX_WITH_SEND_WITH_IMM };
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL };

	e->channel = ibv_create_comp_channel(context);
	NEED(e->channel);
	cq.channel = e->channel;
	e->cq = ibv_create_cq_ex(context, &cq);
	NEED(e->cq);
	attr.send_cq = attr.recv_cq = ibv_cq_ex_to_cq(e->cq);
	e->qp = ibv_create_qp_ex(context, &attr);
	e->mr = ibv_reg_mr(pd, e->memory, SIZE, ALL);
	e->mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	NEED(e->qp && e->mr && e->mw);
	NEED(ibv_modify_qp(e->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		IBV_QP_ACCESS_FLAGS) == 0);
}

static void destroy_end(struct end *e)
{
	CODE(0, ibv_destroy_qp(e->qp));
	CODE(0, ibv_destroy_cq(ibv_cq_ex_to_cq(e->cq)));
	CODE(0, ibv_destroy_comp_channel(e->channel));
	CODE(0, ibv_dealloc_mw(e->mw));
	CODE(0, ibv_dereg_mr(e->mr));
}

static void move_to_rts(struct end *e, const struct end *peer)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .dest_qp_num = peer->qp->qp_num,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid } } };

	NEED(ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN) == 0);
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS };
	NEED(ibv_modify_qp(e->qp, &a, IBV_QP_STATE) == 0);
}

static void connect_both(void)
{
	create_end(&left);
	create_end(&right);
	move_to_rts(&left, &right);
	move_to_rts(&right, &left);
}

/* Waits for the next completion. It stays the current one until the call of end_poll. */
static void expect_completion(struct end *e, uint64_t wr_id, enum ibv_wc_status status)
{
	struct ibv_poll_cq_attr attr = { 0 };
	int got;

	while ((got = ibv_start_poll(e->cq, &attr)) == ENOENT)
		;
	NEED(got == 0);
	CHECK(e->cq->wr_id == wr_id);
	CODE(status, e->cq->status);
}

static void end_poll(struct end *e)
{
	ibv_end_poll(e->cq);
}

static void receive(struct end *e, uint64_t wr_id)
{
	struct ibv_sge sge = { (uintptr_t)e->memory, SIZE, e->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 }, *bad;

	NEED(ibv_post_recv(e->qp, &wr, &bad) == 0);
}

static void send(struct end *e, struct ibv_send_wr wr)
{
	struct ibv_send_wr *bad;

	wr.send_flags |= IBV_SEND_SIGNALED;
	CODE(0, ibv_post_send(e->qp, &wr, &bad));
}

/* A request, the opcode of its completion, and the opcode and flags of the peer's completion. The
 * opcode is -1 if the peer gets none. */
struct reported {
	struct ibv_send_wr wr;
	enum ibv_wc_opcode local;
	int opcode, flags;
};

/* Binds the right end's window to its memory with this key. */
static void bind_window(uint32_t key)
{
	struct ibv_send_wr bind = { .wr_id = 90, .opcode = IBV_WR_BIND_MW };

	bind.bind_mw.mw = right.mw;
	bind.bind_mw.rkey = key;
	bind.bind_mw.bind_info = (struct ibv_mw_bind_info){ right.mr, (uintptr_t)right.memory, 64,
		IBV_ACCESS_REMOTE_READ };
	send(&right, bind);
	expect_completion(&right, 90, IBV_WC_SUCCESS);
	CODE(IBV_WC_BIND_MW, ibv_wc_read_opcode(right.cq));
	end_poll(&right);
}

/* Checks the right end's completion of the receive with this number. */
static void expect_message(const struct reported *expected, uint64_t wr_id, uint32_t key)
{
	expect_completion(&right, wr_id, IBV_WC_SUCCESS);
	CODE(expected->opcode, ibv_wc_read_opcode(right.cq));
	CODE(expected->flags, ibv_wc_read_wc_flags(right.cq));
	CODE(8, (int)ibv_wc_read_byte_len(right.cq));
	if (expected->flags & IBV_WC_WITH_IMM)
		CHECK(ibv_wc_read_imm_data(right.cq) == htobe32(0x01020304));
	if (expected->flags & IBV_WC_WITH_INV)
		CHECK(ibv_wc_read_invalidated_rkey(right.cq) == key);
	end_poll(&right);
}

/* Completions report the opcode of the request and the flags of the message. */
static void test_opcodes_and_flags(void)
{
	struct ibv_sge sge = { (uintptr_t)left.memory, 8, left.mr->lkey };
	uint32_t rkey = right.mr->rkey, key = ibv_inc_rkey(right.mw->rkey);
	uint64_t addr = (uintptr_t)right.memory;
	struct reported all[] = {
		{ { .opcode = IBV_WR_SEND }, IBV_WC_SEND, IBV_WC_RECV, 0 },
		{ { .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htobe32(0x01020304) }, IBV_WC_SEND, IBV_WC_RECV,
			IBV_WC_WITH_IMM },
		{ { .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .imm_data = htobe32(0x01020304),
			.wr.rdma = { addr, rkey } },
			IBV_WC_RDMA_WRITE, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_WITH_IMM },
		{ { .opcode = IBV_WR_SEND_WITH_INV }, IBV_WC_SEND, IBV_WC_RECV, IBV_WC_WITH_INV },
		{ { .opcode = IBV_WR_RDMA_WRITE, .wr.rdma = { addr, rkey } }, IBV_WC_RDMA_WRITE, -1, 0 },
		{ { .opcode = IBV_WR_RDMA_READ, .wr.rdma = { addr, rkey } }, IBV_WC_RDMA_READ, -1, 0 },
		{ { .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .wr.atomic = { addr, 1, 0, rkey } }, IBV_WC_FETCH_ADD,
			-1, 0 },
		{ { .opcode = IBV_WR_ATOMIC_CMP_AND_SWP, .wr.atomic = { addr, 1, 2, rkey } }, IBV_WC_COMP_SWAP,
			-1, 0 },
	};
	unsigned i;

	for (i = 0; i < sizeof(all) / sizeof(*all); i++) {
		struct ibv_send_wr wr = all[i].wr;

		if (wr.opcode == IBV_WR_SEND_WITH_INV) {
			bind_window(key);
			wr.invalidate_rkey = key;
		}
		wr.wr_id = i;
		wr.sg_list = &sge;
		wr.num_sge = 1;
		if (all[i].opcode >= 0)
			receive(&right, 50 + i);
		send(&left, wr);
		expect_completion(&left, i, IBV_WC_SUCCESS);
		CODE(all[i].local, ibv_wc_read_opcode(left.cq));
		CODE((int)left.qp->qp_num, (int)ibv_wc_read_qp_num(left.cq));
		end_poll(&left);
		if (all[i].opcode >= 0)
			expect_message(&all[i], 50 + i, key);
	}
	right.mw->rkey = key;
	/* Binds this key again. Then the same end invalidates it. */
	bind_window(key);
	send(&right, (struct ibv_send_wr){ .wr_id = 91, .opcode = IBV_WR_LOCAL_INV,
		.invalidate_rkey = key });
	expect_completion(&right, 91, IBV_WC_SUCCESS);
	CODE(IBV_WC_LOCAL_INV, ibv_wc_read_opcode(right.cq));
	end_poll(&right);
}

/* A batch of requests with inline data that is too long for the library's buffers on the stack. */
static void test_long_inline_batch(void)
{
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(left.qp);
	char text[MANY * PIECE];
	int i;

	for (i = 0; i < MANY * PIECE; i++)
		text[i] = (char)(i + i / PIECE);
	memset(right.memory, 0, sizeof(right.memory));
	NEED(qp);
	ibv_wr_start(qp);
	for (i = 0; i < MANY; i++) {
		qp->wr_id = 100;
		qp->wr_flags = i == MANY - 1 ? IBV_SEND_SIGNALED : 0;
		ibv_wr_rdma_write(qp, right.mr->rkey, (uintptr_t)right.memory + PIECE * i);
		ibv_wr_set_inline_data(qp, text + PIECE * i, PIECE);
	}
	CODE(0, ibv_wr_complete(qp));
	/* Without a connection manager, a request completes only when the peer has received it. */
	expect_completion(&left, 100, IBV_WC_SUCCESS);
	end_poll(&left);
	CHECK(memcmp(right.memory, text, sizeof(text)) == 0);
}

/* After a request for solicited events only, only a solicited Send of a batch causes an event. */
static void test_solicited_batches(void)
{
	struct ibv_cq *cq = ibv_cq_ex_to_cq(right.cq), *got = NULL;
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(left.qp);
	void *own = NULL;
	int i;

	NEED(ibv_req_notify_cq(cq, 1) == 0);
	for (i = 0; i < 2; i++) {
		receive(&right, 60 + i);
		ibv_wr_start(qp);
		qp->wr_id = 61;
		qp->wr_flags = IBV_SEND_SIGNALED | (i ? IBV_SEND_SOLICITED : 0);
		ibv_wr_send_imm(qp, htobe32(7));
		ibv_wr_set_inline_data(qp, left.memory, 4);
		CODE(0, ibv_wr_complete(qp));
		expect_completion(&left, 61, IBV_WC_SUCCESS);
		end_poll(&left);
	}
	/* If the library ignores the flag, this call never returns. */
	NEED(ibv_get_cq_event(right.channel, &got, &own) == 0);
	CHECK(got == cq && own == &right);
	ibv_ack_cq_events(got, 1);
	CODE(1, (int)cq->comp_events_completed);
	for (i = 0; i < 2; i++) {
		expect_completion(&right, 60 + i, IBV_WC_SUCCESS);
		end_poll(&right);
	}
}

/* Reading the time of a completion twice, with a pause, returns the same time. */
static void test_completion_times(void)
{
	struct timespec pause = { .tv_nsec = 40 * 1000 * 1000 };
	uint64_t min_difference = UINT64_MAX;
	int i;

	send(&left, (struct ibv_send_wr){ .wr_id = 70, .opcode = IBV_WR_RDMA_WRITE,
		.wr.rdma = { (uintptr_t)right.memory, right.mr->rkey } });
	expect_completion(&left, 70, IBV_WC_SUCCESS);
	CHECK(ibv_wc_read_completion_ts(left.cq) != 0);
	/* The library reads two clocks, and the thread may be interrupted between them. So the test
	 * checks the smallest of many differences. */
	for (i = 0; i < 200 && min_difference >= 20 * 1000 * 1000; i++) {
		uint64_t first = ibv_wc_read_completion_wallclock_ns(left.cq), second;

		nanosleep(&pause, NULL);
		second = ibv_wc_read_completion_wallclock_ns(left.cq);
		first = second > first ? second - first : first - second;
		min_difference = first < min_difference ? first : min_difference;
	}
	CHECK(min_difference < 20 * 1000 * 1000);
	end_poll(&left);
}

/* A queue pair without an access right refuses requests that need it, even if the region allows
 * them. */
static void test_queue_pair_access_flags(void)
{
	struct ibv_qp_attr a = { .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ };
	struct ibv_sge sge = { (uintptr_t)left.memory, 8, left.mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 80, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
		.wr.rdma = { (uintptr_t)right.memory, right.mr->rkey } };
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	CODE(0, ibv_modify_qp(right.qp, &a, IBV_QP_ACCESS_FLAGS));
	send(&left, wr);
	expect_completion(&left, 80, IBV_WC_SUCCESS);
	end_poll(&left);
	wr.opcode = IBV_WR_RDMA_WRITE;
	send(&left, wr);
	expect_completion(&left, 80, IBV_WC_REM_ACCESS_ERR);
	end_poll(&left);
	/* A query also updates the public structure. */
	CODE(0, ibv_query_qp(left.qp, &attr, IBV_QP_STATE, &init));
	CODE(IBV_QPS_ERR, attr.qp_state);
	CODE(IBV_QPS_ERR, left.qp->state);
}

static void test_device_attributes(void)
{
	struct ibv_device_attr_ex ex = { 0 };
	struct ibv_device_attr attr;

	CODE(0, ibv_query_device(context, &attr));
	CODE(attr.max_sge, attr.max_srq_sge);
	CODE(attr.max_qp_rd_atom, attr.max_qp_init_rd_atom);
	CODE(0, ibv_query_device_ex(context, NULL, &ex));
	CHECK(ex.xrc_odp_caps == ex.odp_caps.per_transport_caps.rc_odp_caps);
	CODE(1, context->num_comp_vectors);
	CHECK(!(fcntl(context->async_fd, F_GETFL) & O_NONBLOCK));
}

/* A query reports the attributes at creation. A refused ibv_modify_qp does not change them. */
static void test_queue_pair_attributes(void)
{
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_qp_init_attr attr = { .qp_context = &left, .send_cq = cq, .recv_cq = cq,
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = { .max_send_wr = 5, .max_recv_wr = 6, .max_send_sge = 2, .max_recv_sge = 3,
			.max_inline_data = 64 } }, reported = { 0 };
	struct ibv_qp_attr before, after, bad = { .qp_state = IBV_QPS_SQD, .timeout = 3, .retry_cnt = 2,
		.rnr_retry = 1, .rq_psn = 77, .dest_qp_num = 88, .qp_access_flags = ALL }, reads;
	struct ibv_qp *qp;

	NEED(cq);
	qp = ibv_create_qp(pd, &attr);
	NEED(qp);
	memset(&before, 0, sizeof(before));
	memset(&after, 0, sizeof(after));
	CODE(0, ibv_query_qp(qp, &before, ~0, &reported));
	CHECK(reported.qp_context == &left && reported.send_cq == cq && reported.recv_cq == cq &&
		!reported.srq);
	CHECK(reported.qp_type == IBV_QPT_RC && reported.sq_sig_all == 1);
	CHECK(memcmp(&reported.cap, &attr.cap, sizeof(attr.cap)) == 0 &&
		memcmp(&before.cap, &attr.cap, sizeof(attr.cap)) == 0);
	CHECK(attr.cap.max_send_wr >= 5 && attr.cap.max_recv_wr >= 6 && attr.cap.max_send_sge >= 2 &&
		attr.cap.max_recv_sge >= 3);
	CODE(EINVAL, ibv_modify_qp(qp, &bad, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
		IBV_QP_RNR_RETRY | IBV_QP_RQ_PSN |
		IBV_QP_DEST_QPN | IBV_QP_ACCESS_FLAGS));
	CODE(0, ibv_query_qp(qp, &after, ~0, &reported));
	CHECK(memcmp(&before, &after, sizeof(before)) == 0);
	reads = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 1 };
	CODE(0, ibv_modify_qp(qp, &reads, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX |
		IBV_QP_ACCESS_FLAGS));
	reads = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .max_dest_rd_atomic = 3,
		.dest_qp_num = qp->qp_num, .ah_attr = { .is_global = 1, .port_num = 1,
			.grh = { .dgid = gid } } };
	CODE(0, ibv_modify_qp(qp, &reads, IBV_QP_STATE | IBV_QP_AV | IBV_QP_DEST_QPN |
		IBV_QP_MAX_DEST_RD_ATOMIC));
	CODE(0, ibv_query_qp(qp, &after, ~0, &reported));
	CHECK(after.max_dest_rd_atomic == 3 && after.max_rd_atomic == before.max_rd_atomic);
	CODE(0, ibv_destroy_qp(qp));
	CODE(0, ibv_destroy_cq(cq));
}

static void test_sizes(void)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = 20 } };
	struct ibv_srq_attr reported = { 0 }, more = { .max_wr = 50, .srq_limit = 4 };
	struct ibv_cq *cq = ibv_create_cq(context, 20, NULL, NULL, 0);
	struct ibv_srq *srq;
	int before;

	NEED(cq);
	before = cq->cqe;
	CHECK(before >= 20);
	CODE(0, ibv_resize_cq(cq, before + 100));
	CHECK(cq->cqe >= before + 100);
	CODE(0, ibv_destroy_cq(cq));
	/* The request for 0 elements results in at least one. */
	srq = ibv_create_srq(pd, &attr);
	NEED(srq);
	CODE(0, ibv_query_srq(srq, &reported));
	CHECK(attr.attr.max_wr >= 20 && attr.attr.max_sge >= 1);
	CHECK(reported.max_wr == attr.attr.max_wr && reported.max_sge == attr.attr.max_sge &&
		reported.srq_limit == 0);
	CODE(0, ibv_modify_srq(srq, &more, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT));
	CODE(0, ibv_query_srq(srq, &reported));
	CHECK(reported.max_wr >= 50 && reported.srq_limit == 4);
	CODE(0, ibv_destroy_srq(srq));
}

/* A channel counts its completion queues. A completion queue keeps its parent domain in use. */
static void test_reference_counts(void)
{
	struct ibv_parent_domain_init_attr parent = { .pd = pd };
	struct ibv_pd *domain = ibv_alloc_parent_domain(context, &parent);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq_init_attr_ex attr = { .cqe = 8, .channel = channel,
		.comp_mask = IBV_CQ_INIT_ATTR_MASK_PD, .parent_domain = domain };
	struct ibv_cq_ex *extended;
	struct ibv_cq *plain;

	NEED(domain && channel);
	CODE(0, channel->refcnt);
	extended = ibv_create_cq_ex(context, &attr);
	plain = ibv_create_cq(context, 8, NULL, channel, 0);
	NEED(extended && plain);
	CODE(2, channel->refcnt);
	CODE(EBUSY, ibv_dealloc_pd(domain));
	CODE(EBUSY, ibv_destroy_comp_channel(channel));
	CODE(0, ibv_destroy_cq(ibv_cq_ex_to_cq(extended)));
	CODE(1, channel->refcnt);
	CODE(EBUSY, ibv_destroy_comp_channel(channel));
	CODE(0, ibv_destroy_cq(plain));
	CODE(0, channel->refcnt);
	CODE(0, ibv_destroy_comp_channel(channel));
	CODE(0, ibv_dealloc_pd(domain));
}

static struct ibv_cq *tag_cq;

/* Posts an operation on a tag list. It completes immediately. Returns the flags of the
 * completion. */
static int tag_request(struct ibv_srq *srq, struct ibv_ops_wr wr, enum ibv_wc_opcode opcode)
{
	struct ibv_ops_wr *bad = NULL;
	struct ibv_wc wc;

	wr.flags |= IBV_OPS_SIGNALED;
	CODE(0, ibv_post_srq_ops(srq, &wr, &bad));
	NEED(ibv_poll_cq(tag_cq, 1, &wc) == 1);
	CODE(IBV_WC_SUCCESS, wc.status);
	CODE(opcode, wc.opcode);
	CHECK(wc.wr_id == wr.wr_id);
	return wc.wc_flags;
}

/* A list with an unknown tag operation fails at this operation. A wrong count of unexpected
 * messages causes a request to synchronize. */
static void test_tag_operations(void)
{
	struct ibv_srq_init_attr_ex attr = { .attr = { .max_wr = 8, .max_sge = 1 },
		.srq_type = IBV_SRQT_TM, .pd = pd,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ |
			IBV_SRQ_INIT_ATTR_TM,
		.tm_cap = { .max_num_tags = 4, .max_ops = 4 } };
	struct ibv_sge sge = { (uintptr_t)left.memory, 64, left.mr->lkey };
	struct ibv_ops_wr sync = { .wr_id = 5, .opcode = IBV_WR_TAG_SYNC, .flags = IBV_OPS_TM_SYNC,
		.tm = { .unexpected_cnt = 3 } };
	struct ibv_ops_wr add = { .wr_id = 6, .opcode = IBV_WR_TAG_ADD,
		.tm = { .add = { .recv_wr_id = 7, .sg_list = &sge, .num_sge = 1, .tag = 1, .mask = ~0ull } } };
	struct ibv_ops_wr unknown = { .opcode = 9 }, list = add, *bad = NULL;
	struct ibv_srq *srq;

	tag_cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	NEED(tag_cq);
	attr.cq = tag_cq;
	srq = ibv_create_srq_ex(context, &attr);
	NEED(srq);
	list.next = &unknown;
	CODE(EOPNOTSUPP, ibv_post_srq_ops(srq, &list, &bad));
	CHECK(bad == &unknown);
	/* The program reports three unexpected messages, but none has arrived. So added tags do not
	 * take effect until the program synchronizes. */
	tag_request(srq, sync, IBV_WC_TM_SYNC);
	CHECK(tag_request(srq, add, IBV_WC_TM_ADD) & IBV_WC_TM_SYNC_REQ);
	sync.tm.unexpected_cnt = 0;
	tag_request(srq, sync, IBV_WC_TM_SYNC);
	CHECK(!(tag_request(srq, add, IBV_WC_TM_ADD) & IBV_WC_TM_SYNC_REQ));
	CODE(EBUSY, ibv_destroy_cq(tag_cq));
	CODE(0, ibv_destroy_srq(srq));
	CODE(0, ibv_destroy_cq(tag_cq));
}

/* A device can be imported while one of its contexts is open. */
static void test_device_import(void)
{
	int i;

	for (i = 0; i < 3; i++) {
		int fd = dup(context->cmd_fd);
		struct ibv_context *imported = ibv_import_device(fd);

		NEED(fd >= 0 && imported);
		CHECK(imported->device == context->device);
		CODE(0, ibv_close_device(imported));
		MINUS_ONE(EINVAL, ibv_close_device(imported));
	}
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	int cmd;

	NEED(list && list[0]);
	context = ibv_open_device(list[0]);
	NEED(context);
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(context);
	NEED(pd && ibv_query_gid(context, 1, 0, &gid) == 0);
	test_device_attributes();
	test_sizes();
	test_reference_counts();
	test_device_import();
	test_queue_pair_attributes();
	connect_both();
	test_tag_operations();
	test_opcodes_and_flags();
	test_long_inline_batch();
	test_solicited_batches();
	test_completion_times();
	test_queue_pair_access_flags();
	destroy_end(&left);
	destroy_end(&right);
	CODE(0, ibv_dealloc_pd(pd));
	cmd = dup(context->cmd_fd);
	NEED(cmd >= 0);
	CODE(0, ibv_close_device(context));
	IS_NULL(EINVAL, ibv_import_device(cmd));
	return result();
}
