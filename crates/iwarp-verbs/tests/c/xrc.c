/* Tests of extended reliable connections (XRC) in one process: domains, shared receive queue
 * numbers, targets with several handles, errors, and every operation with ibv_post_send and with
 * ibv_wr_*. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include "check.h"

enum { LENGTH = 70000, TIMEOUT_MS = 20000, QUEUES = 2 };

struct queue {
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_mr *mr;
	uint32_t num;
	char buffer[LENGTH] __attribute__((aligned(8)));
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_xrcd *domain;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct queue queues[QUEUES];
static char buffer[LENGTH] __attribute__((aligned(8)));
static union ibv_gid gid;

static struct ibv_xrcd *open_domain(int fd, int oflags)
{
	struct ibv_xrcd_init_attr attr = {
		.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
		.fd = fd, .oflags = oflags,
	};

	return ibv_open_xrcd(context, &attr);
}

static struct ibv_srq *create_srq(struct queue *q, struct ibv_xrcd *xrcd, uint32_t mask)
{
	struct ibv_srq_init_attr_ex attr = {
		.attr = { .max_wr = 16, .max_sge = 1 },
		.comp_mask = mask,
		.srq_type = IBV_SRQT_XRC,
		.pd = q->pd,
		.xrcd = xrcd,
		.cq = q->cq,
	};

	return ibv_create_srq_ex(context, &attr);
}

static const uint32_t all_attributes =
	IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;

static void create_queue(struct queue *q)
{
	q->pd = ibv_alloc_pd(context);
	q->cq = ibv_create_cq(context, 32, q, NULL, 0);
	NEED(q->pd && q->cq);
	NEED((q->srq = create_srq(q, domain, all_attributes)));
	q->mr = ibv_reg_mr(q->pd, q->buffer, LENGTH,
			   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
				   IBV_ACCESS_REMOTE_ATOMIC);
	NEED(q->mr);
	CODE(0, ibv_get_srq_num(q->srq, &q->num));
	CHECK(q->num && q->num < 1 << 24);
}

static void receive(struct queue *q, uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)q->buffer, LENGTH, q->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

	NEED(ibv_post_srq_recv(q->srq, &wr, &bad) == 0);
}

static struct ibv_wc next_completion(struct ibv_cq *from)
{
	struct ibv_wc wc = { 0 };
	int left;

	for (left = TIMEOUT_MS; left > 0; left--) {
		int n = ibv_poll_cq(from, 1, &wc);

		NEED(n >= 0);
		if (n)
			return wc;
		usleep(1000);
	}
	NEED(!"no completion before the timeout");
	exit(2);
}

static struct ibv_qp *create_target(struct ibv_xrcd *xrcd)
{
	struct ibv_qp_init_attr_ex attr = { .qp_type = IBV_QPT_XRC_RECV,
		.comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd };

	return ibv_create_qp_ex(context, &attr);
}

static struct ibv_qp *create_initiator(int extended)
{
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = cq,
		.cap = { .max_send_wr = 32, .max_send_sge = 1 },
		.qp_type = IBV_QPT_XRC_SEND,
		.comp_mask = IBV_QP_INIT_ATTR_PD | (extended ? IBV_QP_INIT_ATTR_SEND_OPS_FLAGS : 0),
		.pd = pd,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
				  IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
				  IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
	};

	return ibv_create_qp_ex(context, &attr);
}

static struct ibv_qp_attr rtr_attributes(const struct ibv_qp *peer)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
		.dest_qp_num = peer->qp_num };

	attr.min_rnr_timer = 12;
	attr.max_dest_rd_atomic = 4;
	attr.ah_attr = (struct ibv_ah_attr){ .is_global = 1, .port_num = 1,
		.grh = { .dgid = gid, .hop_limit = 1 } };
	return attr;
}

static void to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

	attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
	CODE(0, ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		IBV_QP_ACCESS_FLAGS));
}

/* Connects both queue pairs. Each change has exactly the attributes that the InfiniBand
 * specification requires. */
static void connect_ends(struct ibv_qp *initiator, struct ibv_qp *target)
{
	const int rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	to_init(target);
	to_init(initiator);
	attr = rtr_attributes(initiator);
	CODE(0, ibv_modify_qp(target, &attr, rtr | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr = rtr_attributes(target);
	CODE(0, ibv_modify_qp(initiator, &attr, rtr));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7,
		.rnr_retry = 7, .max_rd_atomic = 4 };
	CODE(0, ibv_modify_qp(initiator, &attr,
			      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				      IBV_QP_MAX_QP_RD_ATOMIC));
	CODE(0, ibv_query_qp(initiator, &attr, IBV_QP_STATE, &init));
	CHECK(attr.qp_state == IBV_QPS_RTS && init.qp_type == IBV_QPT_XRC_SEND &&
		init.cap.max_recv_wr == 0);
	CODE(0, ibv_query_qp(target, &attr, IBV_QP_STATE, &init));
	CHECK(attr.qp_state == IBV_QPS_RTR && init.qp_type == IBV_QPT_XRC_RECV);
}

static void post(struct ibv_qp *qp, enum ibv_wr_opcode opcode, const struct queue *to,
	uint32_t length)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	struct ibv_sge sge = { (uintptr_t)buffer, length, mr->lkey };
	struct ibv_send_wr wr = { .opcode = opcode, .sg_list = &sge, .num_sge = 1,
		.send_flags = IBV_SEND_SIGNALED }, *bad;
	uint64_t addr = (uintptr_t)to->buffer;
	uint32_t key = to->mr->rkey;

	if (!ex) {
		wr.imm_data = htonl(77);
		wr.qp_type.xrc.remote_srqn = to->num;
		if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
			wr.wr.atomic.remote_addr = addr;
			wr.wr.atomic.rkey = key;
			wr.wr.atomic.compare_add = 1;
		} else {
			wr.wr.rdma.remote_addr = addr;
			wr.wr.rdma.rkey = key;
		}
		CODE(0, ibv_post_send(qp, &wr, &bad));
		return;
	}
	ibv_wr_start(ex);
	ex->wr_id = 0;
	ex->wr_flags = IBV_SEND_SIGNALED;
	switch (opcode) {
	case IBV_WR_SEND:
		ibv_wr_send(ex);
		break;
	case IBV_WR_SEND_WITH_IMM:
		ibv_wr_send_imm(ex, htonl(77));
		break;
	case IBV_WR_RDMA_WRITE:
		ibv_wr_rdma_write(ex, key, addr);
		break;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		ibv_wr_rdma_write_imm(ex, key, addr, htonl(77));
		break;
	case IBV_WR_RDMA_READ:
		ibv_wr_rdma_read(ex, key, addr);
		break;
	default:
		ibv_wr_atomic_fetch_add(ex, key, addr, 1);
	}
	ibv_wr_set_xrc_srqn(ex, to->num);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)buffer, length);
	CODE(0, ibv_wr_complete(ex));
}

static void test_operations(struct ibv_qp *initiator, struct ibv_qp *target)
{
	int round;

	for (round = 0; round < 10; round++) {
		struct queue *q = &queues[round % QUEUES];
		struct ibv_wc wc;

		memset(buffer, round + 1, LENGTH);
		receive(q, round);
		post(initiator, round % 3 ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM, q, LENGTH);
		wc = next_completion(q->cq);
		CODE(IBV_WC_SUCCESS, wc.status);
		CHECK(wc.opcode == IBV_WC_RECV && wc.wr_id == (uint64_t)round && wc.byte_len == LENGTH);
		CHECK(wc.qp_num == target->qp_num);
		CHECK(!(wc.wc_flags & IBV_WC_WITH_IMM) == (round % 3 != 0));
		CHECK(q->buffer[0] == round + 1 && q->buffer[LENGTH - 1] == round + 1);
		CODE(IBV_WC_SUCCESS, next_completion(cq).status);

		memset(buffer, 0x40 + round, LENGTH);
		post(initiator, IBV_WR_RDMA_WRITE, q, LENGTH);
		CODE(IBV_WC_SUCCESS, next_completion(cq).status);
		CHECK(q->buffer[LENGTH - 1] == 0x40 + round);
		memset(buffer, 0, LENGTH);
		post(initiator, IBV_WR_RDMA_READ, q, LENGTH);
		CODE(IBV_WC_SUCCESS, next_completion(cq).status);
		CHECK(buffer[LENGTH - 1] == 0x40 + round);
		memset(q->buffer, 0, 8);
		post(initiator, IBV_WR_ATOMIC_FETCH_AND_ADD, q, 8);
		CODE(IBV_WC_SUCCESS, next_completion(cq).status);
		CHECK(*(uint64_t *)q->buffer == 1 && *(uint64_t *)buffer == 0);
		receive(q, 99);
		post(initiator, IBV_WR_RDMA_WRITE_WITH_IMM, q, 12);
		wc = next_completion(q->cq);
		CHECK(wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && ntohl(wc.imm_data) == 77 && wc.wr_id == 99);
		CODE(IBV_WC_SUCCESS, next_completion(cq).status);
	}
}

static struct ibv_qp *open_second_handle(struct ibv_xrcd *xrcd, uint32_t num, enum ibv_qp_type type)
{
	struct ibv_qp_open_attr attr = {
		.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE |
			IBV_QP_OPEN_ATTR_CONTEXT,
		.qp_num = num,
		.xrcd = xrcd,
		.qp_context = &attr,
		.qp_type = type,
	};
	struct ibv_qp *qp = ibv_open_qp(context, &attr);

	CHECK(!qp || qp->qp_context == &attr);
	return qp;
}

/* A target exists until its last handle is destroyed. A second handle supports all operations, and
 * gets the target's events. */
static void test_second_handle(void)
{
	struct ibv_qp *initiator = create_initiator(0), *target = create_target(domain), *again;
	struct ibv_xrcd *other = open_domain(-1, O_CREAT);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct queue unknown_queue = { .num = 0 };
	struct ibv_async_event event;
	struct ibv_qp_init_attr init;

	NEED(initiator && target && other);
	IS_NULL(EINVAL, open_second_handle(domain, initiator->qp_num, IBV_QPT_XRC_RECV));
	IS_NULL(EINVAL, open_second_handle(other, target->qp_num, IBV_QPT_XRC_RECV));
	IS_NULL(EINVAL, open_second_handle(domain, target->qp_num, IBV_QPT_RC));
	NEED((again = open_second_handle(domain, target->qp_num, IBV_QPT_XRC_RECV)));
	CHECK(again->qp_num == target->qp_num && again->qp_type == IBV_QPT_XRC_RECV);
	connect_ends(initiator, again);
	CODE(0, ibv_destroy_qp(target));
	test_operations(initiator, again);
	/* A request for an unknown queue number fails, and the remaining handle gets an event. */
	unknown_queue.mr = queues[0].mr;
	post(initiator, IBV_WR_SEND, &unknown_queue, 8);
	CODE(IBV_WC_REM_INV_REQ_ERR, next_completion(cq).status);
	do {
		NEED(ibv_get_async_event(context, &event) == 0);
		CHECK(event.event_type == IBV_EVENT_COMM_EST || event.element.qp == again ||
			event.element.qp == initiator);
		ibv_ack_async_event(&event);
	} while (event.event_type != IBV_EVENT_QP_REQ_ERR);
	CHECK(event.element.qp == again);
	CODE(0, ibv_query_qp(again, &attr, IBV_QP_STATE, &init));
	CODE(IBV_QPS_ERR, (int)attr.qp_state);
	CODE(EBUSY, ibv_close_xrcd(domain));
	CODE(0, ibv_destroy_qp(initiator));
	CODE(0, ibv_destroy_qp(again));
	CODE(EINVAL, ibv_destroy_qp(again));
	CODE(0, ibv_close_xrcd(other));
}

static void test_domains(void)
{
	char name[] = "/tmp/iwarp-xrc-XXXXXX";
	int fd = mkstemp(name), again = open(name, O_RDONLY);
	struct ibv_xrcd_init_attr attr = { .comp_mask = IBV_XRCD_INIT_ATTR_FD, .fd = fd };
	struct ibv_xrcd *first, *second;
	struct ibv_qp *target, *shared;

	NEED(fd >= 0 && again >= 0);
	IS_NULL(EINVAL, ibv_open_xrcd(context, &attr));
	attr.comp_mask = 7;
	IS_NULL(EOPNOTSUPP, ibv_open_xrcd(context, &attr));
	IS_NULL(EINVAL, open_domain(-1, 0));
	IS_NULL(EBADF, open_domain(9999, O_CREAT));
	IS_NULL(EAGAIN, open_domain(fd, 0));
	IS_NULL(EINVAL, open_domain(fd, O_CREAT | O_APPEND));
	NEED((first = open_domain(fd, O_CREAT | O_EXCL)));
	IS_NULL(EINVAL, open_domain(again, O_CREAT | O_EXCL));
	NEED((second = open_domain(again, 0)));
	/* Both handles refer to the same domain, so each of them finds its queue pairs. */
	NEED((target = create_target(first)));
	NEED((shared = open_second_handle(second, target->qp_num, IBV_QPT_XRC_RECV)));
	CODE(EBUSY, ibv_close_xrcd(first));
	CODE(0, ibv_destroy_qp(target));
	CODE(0, ibv_close_xrcd(first));
	CODE(EBUSY, ibv_close_xrcd(second));
	CODE(0, ibv_destroy_qp(shared));
	CODE(0, ibv_close_xrcd(second));
	IS_NULL(EAGAIN, open_domain(again, 0));
	close(fd);
	close(again);
	unlink(name);
}

static void test_errors(void)
{
	struct ibv_qp_init_attr plain = { .send_cq = cq, .recv_cq = cq, .cap = { 8, 8, 1, 1, 0 },
		.qp_type = IBV_QPT_RC };
	struct ibv_qp_init_attr_ex ex = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_PD,
		.pd = pd };
	struct ibv_srq_init_attr basic = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_sge sge = { (uintptr_t)buffer, 8, mr->lkey };
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = 1 }, *bad_send;
	struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_qp *initiator = create_initiator(0), *target = create_target(domain);
	struct ibv_srq *srq = ibv_create_srq(pd, &basic);
	struct ibv_qp_attr attr;
	uint32_t num;

	NEED(initiator && target && srq);
	/* A target requires a domain, an initiator must not have one, and queue pairs of other types
	 * cannot use an XRC shared receive queue. */
	IS_NULL(EINVAL, ibv_create_qp_ex(context, &ex));
	IS_NULL(EINVAL, create_target(NULL));
	ex = (struct ibv_qp_init_attr_ex){ .qp_type = IBV_QPT_XRC_SEND, .send_cq = cq, .pd = pd,
		.xrcd = domain };
	ex.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_XRCD;
	IS_NULL(EINVAL, ibv_create_qp_ex(context, &ex));
	ex.comp_mask = IBV_QP_INIT_ATTR_PD;
	ex.send_cq = NULL;
	IS_NULL(EINVAL, ibv_create_qp_ex(context, &ex));
	plain.srq = queues[0].srq;
	IS_NULL(EINVAL, ibv_create_qp(pd, &plain));
	IS_NULL(EINVAL, create_srq(&queues[0], domain, all_attributes & ~IBV_SRQ_INIT_ATTR_CQ));
	IS_NULL(EINVAL, create_srq(&queues[0], domain, all_attributes & ~IBV_SRQ_INIT_ATTR_XRCD));
	IS_NULL(EINVAL, create_srq(&queues[0], NULL, all_attributes));
	CODE(EINVAL, ibv_get_srq_num(srq, &num));
	CODE(EINVAL, ibv_post_recv(initiator, &recv, &bad));
	CODE(EINVAL, ibv_post_recv(target, &recv, &bad));
	CHECK(bad == &recv);
	CODE(EINVAL, ibv_post_send(target, &wr, &bad_send));
	CHECK(bad_send == &wr);
	/* A queue pair of these types cannot be its own peer. */
	to_init(initiator);
	attr = rtr_attributes(initiator);
	CODE(EINVAL, ibv_modify_qp(initiator, &attr,
				   IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN));
	CODE(EBUSY, ibv_destroy_cq(queues[0].cq));
	CODE(EBUSY, ibv_dealloc_pd(queues[0].pd));
	CODE(0, ibv_destroy_qp(initiator));
	CODE(0, ibv_destroy_qp(target));
	CODE(0, ibv_destroy_srq(srq));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_device_attr device;
	int i;

	NEED(list && list[0]);
	NEED((context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	CODE(0, ibv_query_device(context, &device));
	CHECK(device.device_cap_flags & IBV_DEVICE_XRC);
	NEED((pd = ibv_alloc_pd(context)) && ibv_query_gid(context, 1, 0, &gid) == 0);
	NEED((cq = ibv_create_cq(context, 64, NULL, NULL, 0)));
	NEED((mr = ibv_reg_mr(pd, buffer, LENGTH, IBV_ACCESS_LOCAL_WRITE)));
	NEED((domain = open_domain(-1, O_CREAT)));
	for (i = 0; i < QUEUES; i++)
		create_queue(&queues[i]);
	test_domains();
	test_errors();
	for (i = 0; i < 2; i++) {
		struct ibv_qp *initiator = create_initiator(i), *target = create_target(domain);

		NEED(initiator && target);
		connect_ends(initiator, target);
		test_operations(initiator, target);
		CODE(0, ibv_destroy_qp(target));
		CODE(0, ibv_destroy_qp(initiator));
	}
	test_second_handle();
	CODE(EBUSY, ibv_close_xrcd(domain));
	for (i = 0; i < QUEUES; i++) {
		CODE(0, ibv_destroy_srq(queues[i].srq));
		CODE(0, ibv_dereg_mr(queues[i].mr));
		CODE(0, ibv_destroy_cq(queues[i].cq));
		CODE(0, ibv_dealloc_pd(queues[i].pd));
	}
	CODE(0, ibv_close_xrcd(domain));
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_destroy_cq(cq));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	return result();
}
