/* Two queue pairs of one process, connected by GID and number with either face. */
#ifndef PAIR_H
#define PAIR_H

#include <infiniband/verbs.h>
#include <stdint.h>
#include <time.h>

#include "check.h"

enum {
	PAIR_SIZE = 1 << 16,
	PAIR_ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		IBV_ACCESS_REMOTE_ATOMIC,
	/* Constants that older headers do not define. */
	PAIR_WC_FLUSH = 8,
	PAIR_WITH_FLUSH = 1 << 11,
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
/* The first half belongs to the first queue pair, the second half to its peer. */
static char memory[2 * PAIR_SIZE] __attribute__((aligned(4096)));

struct pair {
	struct ibv_cq *cq[2];
	struct ibv_qp *qp[2];
};

static inline void open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	NEED(list && list[0]);
	NEED((context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	NEED((pd = ibv_alloc_pd(context)));
	NEED((mr = ibv_reg_mr(pd, memory, sizeof(memory), PAIR_ACCESS)));
}

static inline void close_device(void)
{
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
}

static inline void create_pair(struct pair *p, enum ibv_qp_type type, uint64_t ops)
{
	for (int i = 0; i < 2; i++) {
		NEED((p->cq[i] = ibv_create_cq(context, 64, NULL, NULL, 0)));
		struct ibv_qp_init_attr_ex init = {
			.send_cq = p->cq[i],
			.recv_cq = p->cq[i],
			.cap = { .max_send_wr = 32, .max_recv_wr = 32, .max_send_sge = 2, .max_recv_sge = 2,
				.max_inline_data = 64 },
			.qp_type = type,
			.comp_mask = IBV_QP_INIT_ATTR_PD | (ops ? IBV_QP_INIT_ATTR_SEND_OPS_FLAGS : 0),
			.pd = pd, .send_ops_flags = ops,
		};
		NEED((p->qp[i] = ibv_create_qp_ex(context, &init)));
	}
}

static inline void to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = PAIR_ACCESS };

	CODE(0, ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		IBV_QP_ACCESS_FLAGS));
}

static inline void connect_pair(struct pair *p)
{
	int reliable = p->qp[0]->qp_type == IBV_QPT_RC;
	int to_rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	int to_rts = IBV_QP_STATE | IBV_QP_SQ_PSN;

	if (reliable) {
		to_rtr |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
		to_rts |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	}
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
			.max_dest_rd_atomic = 4, .min_rnr_timer = 12, .dest_qp_num = p->qp[1 - i]->qp_num,
				.ah_attr = { .port_num = 1, .is_global = 1 } };

		NEED(ibv_query_gid(context, 1, 0, &a.ah_attr.grh.dgid) == 0);
		a.ah_attr.grh.hop_limit = 1;
		CODE(0, ibv_modify_qp(p->qp[i], &a, to_rtr));
	}
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
			.max_rd_atomic = 4 };

		CODE(0, ibv_modify_qp(p->qp[i], &a, to_rts));
	}
}

static inline void destroy_pair(struct pair *p)
{
	for (int i = 0; i < 2; i++) {
		CODE(0, ibv_destroy_qp(p->qp[i]));
		CODE(0, ibv_destroy_cq(p->cq[i]));
	}
}

static inline struct ibv_wc completion(struct ibv_cq *cq)
{
	time_t end = time(NULL) + 30;
	struct ibv_wc wc;
	int n;

	while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
		NEED(time(NULL) < end);
	NEED(n == 1);
	return wc;
}

/* Posts a request to the first queue pair, with local data at the start of the memory. */
static inline void post_to(struct pair *p, enum ibv_wr_opcode op, uint64_t to, uint32_t rkey,
	uint32_t len, int flags)
{
	struct ibv_sge sge = { (uintptr_t)memory, len, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = op, .sg_list = &sge, .num_sge = 1, .opcode = op,
		.send_flags = flags }, *bad;

	if (op == IBV_WR_ATOMIC_FETCH_AND_ADD || op == IBV_WR_ATOMIC_CMP_AND_SWP) {
		wr.wr.atomic.remote_addr = to;
		wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.compare_add = 5;
	} else {
		wr.wr.rdma.remote_addr = to;
		wr.wr.rdma.rkey = rkey;
	}
	CODE(0, ibv_post_send(p->qp[0], &wr, &bad));
}

static inline void receive(struct pair *p, uint32_t len)
{
	struct ibv_sge sge = { (uintptr_t)memory + PAIR_SIZE, len, mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	CODE(0, ibv_post_recv(p->qp[1], &wr, &bad));
}

#endif
