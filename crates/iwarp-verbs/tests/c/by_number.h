/* Queue pairs of one process, connected by GID and number, with all attributes that InfiniBand
 * requires. */
#ifndef BY_NUMBER_H
#define BY_NUMBER_H

#include <infiniband/verbs.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { TO_INIT = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
       TO_RTR = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
       TO_RTS = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
		IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC };

/* Returns attributes for a change to `to`. The caller's mask selects those that are used. */
static inline struct ibv_qp_attr attributes(struct ibv_context *context, enum ibv_qp_state to,
	uint32_t peer)
{
	struct ibv_qp_attr a = { .qp_state = to, .port_num = 1, .qp_access_flags = 0xf,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = peer, .max_dest_rd_atomic = 4, .min_rnr_timer = 12, .timeout = 14, .retry_cnt = 7,
		.rnr_retry = 7, .max_rd_atomic = 4, .ah_attr = { .is_global = 1, .port_num = 1 } };

	NEED(ibv_query_gid(context, 1, 0, &a.ah_attr.grh.dgid) == 0);
	a.ah_attr.grh.hop_limit = 1;
	return a;
}

static inline int move_to(struct ibv_qp *qp, enum ibv_qp_state to, uint32_t peer, int mask)
{
	struct ibv_qp_attr a = attributes(qp->context, to, peer);

	return ibv_modify_qp(qp, &a, mask);
}

static inline void connect_both(struct ibv_qp *a, struct ibv_qp *b)
{
	NEED(move_to(a, IBV_QPS_INIT, 0, TO_INIT) == 0 && move_to(b, IBV_QPS_INIT, 0, TO_INIT) == 0);
	NEED(move_to(a, IBV_QPS_RTR, b->qp_num, TO_RTR) == 0 &&
		move_to(b, IBV_QPS_RTR, a->qp_num, TO_RTR) == 0);
	NEED(move_to(a, IBV_QPS_RTS, 0, TO_RTS) == 0 && move_to(b, IBV_QPS_RTS, 0, TO_RTS) == 0);
}

static inline struct ibv_context *open_first(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;

	NEED(list && list[0]);
	context = ibv_open_device(list[0]);
	NEED(context);
	ibv_free_device_list(list);
	return context;
}

static inline void expect_completions(struct ibv_cq *cq, int n, enum ibv_wc_status status)
{
	struct ibv_wc wc;
	time_t end = time(NULL) + 20;

	while (n > 0) {
		int got = ibv_poll_cq(cq, 1, &wc);

		NEED(got >= 0 && time(NULL) < end);
		if (got)
			CODE(status, wc.status);
		n -= got;
	}
}

#endif
