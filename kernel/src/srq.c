// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Shared receive queues: rings of receives for several queue pairs. As with the rings of a queue
 * pair, the program fills entries without a system call, and may write anything into them at any
 * time. For kernel clients, post.c fills the entries.
 */
#include <linux/log2.h>
#include <rdma/uverbs_ioctl.h>

#include "rnic.h"

int rnic_create_srq(struct ib_srq *base, struct ib_srq_init_attr *attributes,
		    struct ib_udata *udata)
{
	struct ib_srq_attr *requested = &attributes->attr;
	struct rnic_srq *srq = to_srq(base);
	struct siw_uresp_create_srq response = {};
	int result;

	if (attributes->srq_type != IB_SRQT_BASIC)
		return -EOPNOTSUPP;
	if (!requested->max_wr || requested->max_wr > RNIC_MAX_WR ||
	    requested->max_sge > SIW_MAX_SGE || requested->srq_limit > requested->max_wr ||
	    (udata && udata->outlen < sizeof(response)))
		return -EINVAL;
	spin_lock_init(&srq->lock);
	response.num_rqe = roundup_pow_of_two(requested->max_wr);
	result = rnic_ring_create(&srq->ring, rnic_context_of(udata), response.num_rqe,
				  sizeof(struct siw_rqe), &response.srq_key);
	if (result)
		return result;
	requested->max_wr = response.num_rqe;
	srq->max_sge = requested->max_sge;
	srq->limit = requested->srq_limit;
	if (!udata)
		return 0;
	result = ib_copy_to_udata(udata, &response, sizeof(response));
	if (result)
		rnic_ring_free(&srq->ring);
	return result;
}

/* Sets the limit. The size cannot change, because the program's library maps the ring only once. */
int rnic_modify_srq(struct ib_srq *base, struct ib_srq_attr *attributes,
		    enum ib_srq_attr_mask mask, struct ib_udata *udata)
{
	struct rnic_srq *srq = to_srq(base);

	if (mask & ~IB_SRQ_LIMIT)
		return -EOPNOTSUPP;
	if (attributes->srq_limit > srq->ring.count)
		return -EINVAL;
	spin_lock_bh(&srq->lock);
	srq->limit = attributes->srq_limit;
	spin_unlock_bh(&srq->lock);
	return 0;
}

int rnic_query_srq(struct ib_srq *base, struct ib_srq_attr *attributes)
{
	struct rnic_srq *srq = to_srq(base);

	spin_lock_bh(&srq->lock);
	attributes->srq_limit = srq->limit;
	spin_unlock_bh(&srq->lock);
	attributes->max_wr = srq->ring.count;
	attributes->max_sge = srq->max_sge;
	return 0;
}

int rnic_destroy_srq(struct ib_srq *base, struct ib_udata *udata)
{
	rnic_ring_free(&to_srq(base)->ring);
	return 0;
}

/* Takes the oldest receive. The caller holds a queue pair's lock and has disabled bottom halves. */
bool rnic_srq_take(struct rnic_srq *srq, struct rk_receive *receive)
{
	bool taken;

	spin_lock(&srq->lock);
	taken = rnic_take_receive(&srq->ring, receive);
	/*
	 * The program fills the entries in order. So if the entry `limit` - 1 places after the
	 * oldest one is empty, fewer than `limit` receives are posted.
	 */
	if (srq->limit && !rnic_receive_is_posted(&srq->ring, srq->limit - 1)) {
		srq->limit = 0;
		srq->limit_reached = true;
	}
	spin_unlock(&srq->lock);
	return taken;
}

/*
 * Notifies the program if the limit was reached. Called without locks, because a handler may call
 * the driver.
 */
void rnic_srq_notify(struct rnic_srq *srq)
{
	struct ib_event event = {
		.device = srq->base.device,
		.element.srq = &srq->base,
		.event = IB_EVENT_SRQ_LIMIT_REACHED,
	};
	bool reached;

	spin_lock_bh(&srq->lock);
	reached = srq->limit_reached;
	srq->limit_reached = false;
	spin_unlock_bh(&srq->lock);
	if (reached && srq->base.event_handler)
		srq->base.event_handler(&event, srq->base.srq_context);
}
