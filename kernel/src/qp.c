// SPDX-License-Identifier: MIT OR Apache-2.0
/* Queue pairs: create, find by number, modify, destroy. */
#include <linux/log2.h>
#include <linux/module.h>
#include <rdma/uverbs_ioctl.h>

#include "rnic.h"

#define MAX_NUMBER 0xffffff
/* How long the peer may take to close the connection of a destroyed queue pair. */
#define CLOSE_TIMEOUT (2 * HZ)

static void last_reference(struct kref *ref)
{
	complete(&container_of(ref, struct rnic_qp, ref)->released);
}

void rnic_qp_get(struct ib_qp *qp)
{
	kref_get(&to_qp(qp)->ref);
}

void rnic_qp_put(struct ib_qp *qp)
{
	kref_put(&to_qp(qp)->ref, last_reference);
}

/*
 * Finds a queue pair, and takes the reference that iw_cm would take afterwards. That would be too
 * late: the program may pass the number of a queue pair that is being destroyed.
 */
struct ib_qp *rnic_iw_get_qp(struct ib_device *base, int number)
{
	struct rnic_device *device = to_device(base);
	struct rnic_qp *qp;
	unsigned long flags;

	xa_lock_irqsave(&device->qps, flags);
	qp = xa_load(&device->qps, number);
	if (qp)
		kref_get(&qp->ref);
	xa_unlock_irqrestore(&device->qps, flags);
	return qp ? &qp->base : NULL;
}

/* iw_cm calls this only after rnic_iw_get_qp(), which has taken the reference. */
void rnic_iw_add_ref(struct ib_qp *qp)
{
}

/* Finds the queue pair of an iw_cm call. iw_cm holds a reference to it. */
struct rnic_qp *rnic_find_qp(struct ib_device *device, int number)
{
	return xa_load(&to_device(device)->qps, number);
}

static int create_engine(struct rnic_qp *qp, const struct ib_qp_init_attr *attributes)
{
	struct rk_qp_config config = {
		.qp_num = qp->base.qp_num,
		.pd = to_pd(qp->base.pd)->number,
		.max_send_wr = qp->sq.count,
		.max_sge = SIW_MAX_SGE,
		.max_inline = SIW_MAX_INLINE,
		.max_ird = RNIC_MAX_READS,
		.max_ord = RNIC_MAX_READS,
		.signal_all = attributes->sq_sig_type == IB_SIGNAL_ALL_WR,
		.shared_receive = true,
		.hold_ms = rnic_rnr_wait_ms ? rnic_rnr_wait_ms : RK_HOLD_NOT,
	};

	qp->engine = rk_qp_new(&config, qp);
	return qp->engine ? 0 : -ENOMEM;
}

static int check_attributes(const struct ib_qp_init_attr *attributes, const struct ib_udata *udata)
{
	const struct ib_qp_cap *cap = &attributes->cap;

	if (attributes->qp_type != IB_QPT_RC || attributes->create_flags)
		return -EOPNOTSUPP;
	if (cap->max_send_wr > RNIC_MAX_WR || cap->max_send_sge > SIW_MAX_SGE ||
	    (!attributes->srq && cap->max_recv_wr > RNIC_MAX_WR) ||
	    cap->max_recv_sge > SIW_MAX_SGE || cap->max_inline_data > SIW_MAX_INLINE ||
	    !attributes->send_cq || !attributes->recv_cq ||
	    (udata && udata->outlen < sizeof(struct siw_uresp_create_qp)))
		return -EINVAL;
	return 0;
}

static void free_parts(struct rnic_qp *qp)
{
	if (qp->engine)
		rnic_area_release(qp);
	rk_qp_free(qp->engine);
	rnic_ring_free(&qp->sq);
	rnic_ring_free(&qp->rq);
}

/*
 * Creates the rings. Kernel clients post sends to the engine directly, so they have no send ring.
 * Both kernel clients and programs have a receive ring, from which the engine takes receives.
 */
static int create_rings(struct rnic_qp *qp, struct rnic_ucontext *context, bool receives,
			struct siw_uresp_create_qp *response)
{
	int result = 0;

	qp->sq.count = response->num_sqe;
	if (context)
		result = rnic_ring_create(&qp->sq, context, response->num_sqe,
					  sizeof(struct siw_sqe), &response->sq_key);
	if (!result && receives)
		result = rnic_ring_create(&qp->rq, context, response->num_rqe,
					  sizeof(struct siw_rqe), &response->rq_key);
	return result;
}

/* `udata` is NULL for a kernel client. */
int rnic_create_qp(struct ib_qp *base, struct ib_qp_init_attr *attributes, struct ib_udata *udata)
{
	struct rnic_device *device = to_device(base->device);
	struct siw_uresp_create_qp response = {};
	struct rnic_qp *qp = to_qp(base);
	u32 number;
	int result;

	result = check_attributes(attributes, udata);
	if (result)
		return result;
	spin_lock_init(&qp->lock);
	init_llist_head(&qp->irq_posts);
	INIT_LIST_HEAD(&qp->partial_entry);
	kref_init(&qp->ref);
	init_completion(&qp->released);
	rnic_stream_init(qp);
	response.num_sqe = roundup_pow_of_two(max(attributes->cap.max_send_wr, 1u));
	if (!attributes->srq)
		response.num_rqe = roundup_pow_of_two(max(attributes->cap.max_recv_wr, 1u));
	result = xa_alloc_cyclic_bh(&device->qps, &number, NULL, XA_LIMIT(1, MAX_NUMBER),
				    &device->next_qp, RNIC_GFP);
	if (result < 0)
		return result;
	base->qp_num = number;
	response.qp_id = number;
	result = create_rings(qp, rnic_context_of(udata), !attributes->srq, &response);
	if (!result)
		result = rnic_area_reserve(device);
	if (!result)
		result = create_engine(qp, attributes);
	if (!result && udata)
		result = ib_copy_to_udata(udata, &response, sizeof(response));
	if (result) {
		xa_erase_bh(&device->qps, number);
		free_parts(qp);
		return result;
	}
	attributes->cap.max_inline_data = SIW_MAX_INLINE;
	qp->cap = attributes->cap;
	/* From now on, rnic_iw_get_qp() finds the queue pair. */
	xa_store_bh(&device->qps, number, qp, GFP_KERNEL);
	return 0;
}

static int state_of(const struct rnic_qp *qp)
{
	static const enum ib_qp_state states[] = {
		[RK_STATE_RESET] = IB_QPS_RESET,
		[RK_STATE_INIT] = IB_QPS_INIT,
		[RK_STATE_RTR] = IB_QPS_RTR,
		[RK_STATE_RTS] = IB_QPS_RTS,
		[RK_STATE_SQD] = IB_QPS_SQD,
		[RK_STATE_SQE] = IB_QPS_SQE,
		[RK_STATE_ERROR] = IB_QPS_ERR,
	};

	return states[rk_qp_state(qp->engine)];
}

/*
 * Changes the state at the request of a program. Connecting moves a queue pair to RTS. librdmacm
 * requests RTR before it accepts a connection, for which nothing has to be done.
 */
static int change_state(struct rnic_qp *qp, enum ib_qp_state to)
{
	int result;

	switch (to) {
	case IB_QPS_RESET:
		result = rk_qp_modify(qp->engine, RK_STATE_RESET);
		if (!result)
			rnic_give_up(qp);
		return result;
	case IB_QPS_INIT:
		/* Some programs request all states one after the other when they are connected. */
		return state_of(qp) == IB_QPS_RTS ? 0 : rk_qp_modify(qp->engine, RK_STATE_INIT);
	case IB_QPS_RTR:
		return state_of(qp) <= IB_QPS_RTS ? 0 : -EINVAL;
	case IB_QPS_RTS:
		return state_of(qp) == IB_QPS_RTS ? 0 : -EINVAL;
	case IB_QPS_SQD:
		rk_qp_close(qp->engine);
		return 0;
	default:
		return rk_qp_modify(qp->engine, RK_STATE_ERROR);
	}
}

int rnic_modify_qp(struct ib_qp *base, struct ib_qp_attr *attributes, int mask,
		   struct ib_udata *udata)
{
	struct rnic_qp *qp = to_qp(base);
	int result;

	if (mask & ~IB_QP_ATTR_STANDARD_BITS)
		return -EOPNOTSUPP;
	if (!(mask & IB_QP_STATE))
		return 0;
	spin_lock_bh(&qp->lock);
	result = change_state(qp, attributes->qp_state);
	spin_unlock_bh(&qp->lock);
	/* These states end the connection. Do that here, without waiting for the work item. */
	if (attributes->qp_state == IB_QPS_RESET || attributes->qp_state > IB_QPS_RTS)
		rnic_stream_turn(qp);
	else
		rnic_apply_effects(qp);
	return result;
}

int rnic_query_qp(struct ib_qp *base, struct ib_qp_attr *attributes, int mask,
		  struct ib_qp_init_attr *init)
{
	struct rnic_qp *qp = to_qp(base);

	spin_lock_bh(&qp->lock);
	attributes->qp_state = state_of(qp);
	spin_unlock_bh(&qp->lock);
	/*
	 * Programs expect that a new queue pair of an iWARP RNIC is in INIT: they do not request
	 * that state before they connect.
	 */
	if (attributes->qp_state == IB_QPS_RESET)
		attributes->qp_state = IB_QPS_INIT;
	attributes->cur_qp_state = attributes->qp_state;
	attributes->cap = qp->cap;
	attributes->path_mtu = ib_mtu_int_to_enum(to_device(base->device)->netdev->mtu);
	attributes->max_rd_atomic = RNIC_MAX_READS;
	attributes->max_dest_rd_atomic = RNIC_MAX_READS;
	attributes->qp_access_flags = RNIC_RIGHTS;
	init->qp_type = base->qp_type;
	init->send_cq = base->send_cq;
	init->recv_cq = base->recv_cq;
	init->srq = base->srq;
	init->cap = qp->cap;
	return 0;
}

int rnic_destroy_qp(struct ib_qp *base, struct ib_udata *udata)
{
	struct rnic_device *device = to_device(base->device);
	struct rnic_qp *qp = to_qp(base);

	spin_lock_bh(&qp->lock);
	rk_qp_modify(qp->engine, RK_STATE_ERROR);
	spin_unlock_bh(&qp->lock);
	/*
	 * From now on, the queue pair cannot be found, so nobody takes a reference after the last
	 * one was dropped.
	 */
	xa_lock_bh(&device->qps);
	__xa_erase(&device->qps, base->qp_num);
	spin_lock(&qp->lock);
	rk_qp_counters(qp->engine, device->retired_counters);
	spin_unlock(&qp->lock);
	xa_unlock_bh(&device->qps);
	rnic_stream_turn(qp);
	rnic_qp_put(base);
	/*
	 * The stream and iw_cm may hold references. iw_cm drops its references soon, but the stream
	 * waits for the peer, which may never close.
	 */
	if (!wait_for_completion_timeout(&qp->released, CLOSE_TIMEOUT)) {
		spin_lock_bh(&qp->lock);
		rnic_give_up(qp);
		spin_unlock_bh(&qp->lock);
		rnic_stream_kick(qp);
		wait_for_completion(&qp->released);
	}
	rnic_stream_free(qp);
	rnic_cq_remove_qp(to_cq(base->send_cq), qp);
	rnic_cq_remove_qp(to_cq(base->recv_cq), qp);
	free_parts(qp);
	return 0;
}
