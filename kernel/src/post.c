// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Work requests of kernel clients, and the doorbell of programs. Clients post requests in any
 * context, also with interrupts off, in interrupts (such as a disk's, when it has read the data for
 * a peer), and in completion handlers. Requests that are posted together are sent together.
 *
 * An interrupt may arrive while its processor holds the queue pair's lock. So with interrupts off,
 * that lock is not taken: sends are put on a list, which the next holder of the lock drains, and
 * receives are put into their ring, which has its own lock.
 */
#include <linux/llist.h>
#include <linux/log2.h>
#include <linux/slab.h>
#include <net/sock.h>

#include "rnic.h"

static_assert(sizeof(struct ib_sge) == sizeof(struct rk_sge));

/* ---- sends ---- */

static u32 flags_of(const struct ib_send_wr *request)
{
	return (request->send_flags & IB_SEND_SIGNALED ? RK_SIGNALED : 0) |
	       (request->send_flags & IB_SEND_SOLICITED ? RK_SOLICITED : 0) |
	       (request->send_flags & IB_SEND_FENCE ? RK_FENCE : 0);
}

static void set_remote(struct rk_send *send, const struct ib_send_wr *request)
{
	send->remote_addr = rdma_wr(request)->remote_addr;
	send->rkey = rdma_wr(request)->rkey;
}

/* Describes the pages that ib_map_mr_sg() has put into the region's list. */
static void set_pages(struct rk_send *send, const struct ib_reg_wr *request)
{
	const struct rnic_mr *mr = to_mr(request->mr);

	send->rkey = request->key;
	send->remote_addr = mr->base.iova;
	send->len = mr->base.length;
	send->access = request->access & RNIC_RIGHTS;
	send->first = mr->base.iova & (mr->base.page_size - 1);
	send->num_pages = mr->num_pages;
	send->page_shift = ilog2(mr->base.page_size);
}

static int translate(const struct ib_send_wr *request, struct rk_send *send)
{
	switch (request->opcode) {
	case IB_WR_SEND:
		send->op = RK_SEND;
		return 0;
	case IB_WR_SEND_WITH_INV:
		send->op = RK_SEND_INV;
		send->rkey = request->ex.invalidate_rkey;
		return 0;
	case IB_WR_SEND_WITH_IMM:
		send->op = RK_SEND_IMM;
		send->imm = be32_to_cpu(request->ex.imm_data);
		return 0;
	case IB_WR_RDMA_WRITE:
		send->op = RK_WRITE;
		set_remote(send, request);
		return 0;
	case IB_WR_RDMA_WRITE_WITH_IMM:
		send->op = RK_WRITE_IMM;
		send->imm = be32_to_cpu(request->ex.imm_data);
		set_remote(send, request);
		return 0;
	case IB_WR_RDMA_READ:
		send->op = RK_READ;
		set_remote(send, request);
		return 0;
	case IB_WR_RDMA_READ_WITH_INV:
		/*
		 * Ignore invalidate_rkey: it may be out of date, because rdma_rw_ctx_post() changes
		 * the region's key after it has stored invalidate_rkey. The engine invalidates the
		 * region of the Read's sink.
		 */
		send->op = RK_READ_INV;
		set_remote(send, request);
		return 0;
	case IB_WR_LOCAL_INV:
		send->op = RK_LOCAL_INV;
		send->rkey = request->ex.invalidate_rkey;
		return 0;
	case IB_WR_REG_MR:
		send->op = RK_FAST_REG;
		set_pages(send, reg_wr(request));
		return 0;
	default:
		return -EOPNOTSUPP;
	}
}

/* Copies inline data. The elements contain kernel addresses. */
static int copy_inline(const struct ib_send_wr *request, struct rk_send *send, u8 *data)
{
	int i;

	if (send->op == RK_READ || send->op == RK_READ_INV)
		return -EINVAL;
	for (i = 0; i < request->num_sge; i++) {
		const struct ib_sge *sge = &request->sg_list[i];

		if (sge->length > SIW_MAX_INLINE - send->inline_len)
			return -EINVAL;
		memcpy(data + send->inline_len, (const void *)(uintptr_t)sge->addr, sge->length);
		send->inline_len += sge->length;
	}
	send->flags |= RK_INLINE;
	send->inline_data = data;
	send->num_sge = 0;
	return 0;
}

/* Called with the lock. */
static int post_one(struct rnic_qp *qp, const struct ib_send_wr *request)
{
	u8 data[SIW_MAX_INLINE];
	struct rk_send send = {
		.wr_id = request->wr_id,
		.flags = flags_of(request),
		.sges = (const struct rk_sge *)request->sg_list,
		.num_sge = request->num_sge,
	};
	int result = translate(request, &send);

	if (!result && request->send_flags & IB_SEND_INLINE)
		result = copy_inline(request, &send, data);
	return result ? result : rk_post_send(qp->engine, &send);
}

/* A request that was posted with interrupts off. It exists until the engine takes it. */
struct irq_post {
	struct llist_node node;
	struct rk_send send;
	struct ib_sge sges[SIW_MAX_SGE];
	u8 data[SIW_MAX_INLINE];
};

/*
 * Queues a request for the engine. If the engine refuses the request later, it completes with an
 * error. Any context.
 */
static int post_from_irq(struct rnic_qp *qp, const struct ib_send_wr *request)
{
	struct irq_post *post;
	int result;

	if (request->num_sge > SIW_MAX_SGE)
		return -EINVAL;
	post = kzalloc(sizeof(*post), GFP_ATOMIC);
	if (!post)
		return -ENOMEM;
	post->send.wr_id = request->wr_id;
	post->send.flags = flags_of(request);
	post->send.sges = (const struct rk_sge *)post->sges;
	post->send.num_sge = request->num_sge;
	if (request->num_sge)
		memcpy(post->sges, request->sg_list, request->num_sge * sizeof(*post->sges));
	result = translate(request, &post->send);
	if (!result && request->send_flags & IB_SEND_INLINE)
		result = copy_inline(request, &post->send, post->data);
	if (result)
		kfree(post);
	else
		llist_add(&post->node, &qp->irq_posts);
	return result;
}

/*
 * Passes requests that were posted with interrupts off to the engine, in order. Called with the
 * lock.
 */
void rnic_take_irq_posts(struct rnic_qp *qp)
{
	struct llist_node *list = llist_reverse_order(llist_del_all(&qp->irq_posts));
	struct irq_post *post, *next;

	llist_for_each_entry_safe(post, next, list, node) {
		if (rk_post_send(qp->engine, &post->send))
			rnic_complete_refused(qp, post->send.wr_id);
		kfree(post);
	}
}

static int post_all_from_irq(struct rnic_qp *qp, const struct ib_send_wr *requests,
			     const struct ib_send_wr **bad)
{
	int result = 0;

	for (; requests && !result; requests = requests->next) {
		result = post_from_irq(qp, requests);
		if (result)
			*bad = requests;
	}
	rnic_send_soon(qp);
	return result;
}

/* A program calls this as its doorbell, without requests, which are in its ring. */
int rnic_post_send(struct ib_qp *base, const struct ib_send_wr *requests,
		   const struct ib_send_wr **bad)
{
	struct rnic_qp *qp = to_qp(base);
	struct sock *sk;
	int result = 0;

	if (qp->sq.entries && !requests)
		return rnic_stream_send(qp);
	if (qp->sq.entries) {
		*bad = requests;
		return -EOPNOTSUPP;
	}
	if (irqs_disabled())
		return post_all_from_irq(qp, requests, bad);
	spin_lock_bh(&qp->lock);
	rnic_take_irq_posts(qp);
	for (; requests; requests = requests->next) {
		result = post_one(qp, requests);
		if (result) {
			*bad = requests;
			break;
		}
	}
	sk = qp->sk;
	if (sk) {
		sock_hold(sk);
		/* Another processor may destroy the queue pair once these requests complete. */
		rnic_qp_get(&qp->base);
	}
	spin_unlock(&qp->lock);
	if (sk) {
		rnic_stream_push(qp, sk);
		sock_put(sk);
		rnic_qp_put(&qp->base);
	} else {
		/* Requests are flushed if the queue pair is in error. */
		rnic_apply_effects(qp);
	}
	local_bh_enable();
	return result;
}

/* ---- receives ---- */

/* Puts receives into a ring. Any context. */
static int add_receives(struct rnic_ring *ring, const struct ib_recv_wr *requests,
			const struct ib_recv_wr **bad)
{
	unsigned long flags;
	int result = 0;

	spin_lock_irqsave(&ring->fill_lock, flags);
	for (; requests; requests = requests->next) {
		result = ring->mapping ? -EOPNOTSUPP : rnic_ring_add_receive(ring, requests);
		if (result) {
			*bad = requests;
			break;
		}
	}
	spin_unlock_irqrestore(&ring->fill_lock, flags);
	return result;
}

int rnic_post_recv(struct ib_qp *base, const struct ib_recv_wr *requests,
		   const struct ib_recv_wr **bad)
{
	struct rnic_qp *qp = to_qp(base);
	int result = add_receives(&qp->rq, requests, bad);
	bool awaited;

	if (irqs_disabled()) {
		/* The tasklet checks whether a Send waits for this receive. */
		tasklet_schedule(&qp->sender);
		return result;
	}
	spin_lock_bh(&qp->lock);
	/* A Send may be waiting for this receive. In the error state, the receive is flushed. */
	awaited = rk_rx_interest(qp->engine) == RK_RX_WAIT ||
		  rk_qp_state(qp->engine) == RK_STATE_ERROR;
	spin_unlock_bh(&qp->lock);
	if (awaited)
		rnic_stream_kick(qp);
	return result;
}

/* If a Send waits for a receive of this queue, the queue pair's timer retries it every tick. */
int rnic_post_srq_recv(struct ib_srq *base, const struct ib_recv_wr *requests,
		       const struct ib_recv_wr **bad)
{
	return add_receives(&to_srq(base)->ring, requests, bad);
}
