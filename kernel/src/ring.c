// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Send and receive queues of programs: rings of siw's entries, which a program fills without a
 * system call. A full entry has the flag SIW_WQE_VALID. Kernel clients have rings only for
 * receives, in private memory; post.c fills them.
 *
 * A program may write anything into its ring at any time. Each entry is therefore copied once, word
 * by word, and the copy is checked; the kernel's own index selects the next entry.
 */
#include <linux/log2.h>

#include "rnic.h"

static_assert(sizeof(struct siw_sqe) == 120 && sizeof(struct siw_rqe) == 112);
static_assert(sizeof(struct siw_sge) == sizeof(struct rk_sge) && RK_RECEIVE_SGES == SIW_MAX_SGE);
static_assert(sizeof(struct siw_sge) == sizeof(struct ib_sge));

/* Copies an entry, which may change meanwhile. Each word is read exactly once. */
static void copy_entry(u64 *to, const u64 *from, size_t octets)
{
	size_t i;

	for (i = 0; i < octets / sizeof(u64); i++)
		to[i] = READ_ONCE(from[i]);
}

int rnic_ring_create(struct rnic_ring *ring, struct rnic_ucontext *context, u32 count, size_t entry,
		     u64 *key)
{
	ring->count = count;
	spin_lock_init(&ring->fill_lock);
	ring->entries = rnic_queue_memory(context, array_size(count, entry), &ring->mapping, key);
	return ring->entries ? 0 : -ENOMEM;
}

void rnic_ring_free(struct rnic_ring *ring)
{
	rnic_queue_memory_free(ring->entries, ring->mapping);
}

/*
 * Completes, with an error, a request that the engine has refused, and ends the connection. Called
 * with the queue pair's lock.
 */
void rnic_complete_refused(struct rnic_qp *qp, u64 wr_id)
{
	struct rk_completion completion = {
		.wr_id = wr_id,
		.status = RK_WC_LOC_QP_OP_ERR,
	};

	iwarp_complete(qp, false, &completion);
	rk_qp_modify(qp->engine, RK_STATE_ERROR);
}

static struct siw_sqe *next_send(const struct rnic_qp *qp)
{
	return (struct siw_sqe *)qp->sq.entries + (qp->sq.next & (qp->sq.count - 1));
}

/*
 * Returns true if the program has filled the entry. The program first fills an entry, and then
 * rings the doorbell unless the previous entry is still full. So after the driver has taken the
 * previous entry, it must execute a barrier and check this one again. Without the barrier, the
 * program may not ring, and the driver may not see the entry.
 */
static bool is_filled(const struct siw_sqe *entry)
{
	if (smp_load_acquire(&entry->flags) & SIW_WQE_VALID)
		return true;
	smp_mb();
	return smp_load_acquire(&entry->flags) & SIW_WQE_VALID;
}

static int post_entry(struct rnic_qp *qp, const struct siw_sqe *entry)
{
	struct rk_send send = {
		.wr_id = entry->id,
		.remote_addr = entry->raddr,
		.rkey = entry->rkey,
		.sges = (const struct rk_sge *)entry->sge,
		.num_sge = entry->num_sge,
	};

	switch (entry->opcode) {
	case SIW_OP_WRITE:
		send.op = RK_WRITE;
		break;
	case SIW_OP_READ:
		send.op = RK_READ;
		break;
	case SIW_OP_SEND:
		send.op = RK_SEND;
		break;
	case SIW_OP_SEND_REMOTE_INV:
		send.op = RK_SEND_INV;
		break;
	default:
		return -EINVAL;
	}
	send.flags = (entry->flags & SIW_WQE_SIGNALLED ? RK_SIGNALED : 0) |
		     (entry->flags & SIW_WQE_SOLICITED ? RK_SOLICITED : 0) |
		     (entry->flags & SIW_WQE_READ_FENCE ? RK_FENCE : 0);
	if (entry->flags & SIW_WQE_INLINE) {
		/* Inline data are stored in place of the second and later elements. */
		if (entry->sge[0].length > SIW_MAX_INLINE || send.op == RK_READ)
			return -EINVAL;
		send.flags |= RK_INLINE;
		send.inline_data = (const u8 *)&entry->sge[1];
		send.inline_len = entry->sge[0].length;
		send.num_sge = 0;
	} else if (entry->num_sge > SIW_MAX_SGE) {
		return -EINVAL;
	}
	return rk_post_send(qp->engine, &send);
}

/*
 * Passes the program's requests to the engine until its queue is full. The remaining requests are
 * passed when others complete. Called with the queue pair's lock.
 */
void rnic_take_sends(struct rnic_qp *qp)
{
	u32 budget;

	rnic_take_irq_posts(qp);
	qp->sends_pending = false;
	/* A program must not post before the state RTS. Kernel clients have no send ring. */
	if (rk_qp_state(qp->engine) < RK_STATE_RTS || !qp->sq.entries)
		return;
	for (budget = RNIC_SENDS_AT_ONCE; budget; budget--) {
		struct siw_sqe *entry = next_send(qp);
		struct siw_sqe copy;
		int result;

		if (!is_filled(entry))
			return;
		copy_entry((u64 *)&copy, (const u64 *)entry, sizeof(copy));
		result = post_entry(qp, &copy);
		if (result == -ENOMEM)
			break;
		qp->sq.next++;
		smp_store_release(&entry->flags, 0);
		if (result)
			rnic_complete_refused(qp, copy.id);
	}
	qp->sends_pending = true;
}

/* Returns the receive at offset `offset`. */
static struct siw_rqe *receive_at(const struct rnic_ring *ring, u32 offset)
{
	return (struct siw_rqe *)ring->entries + ((ring->next + offset) & (ring->count - 1));
}

bool rnic_receive_is_posted(const struct rnic_ring *ring, u32 offset)
{
	return ring->count && smp_load_acquire(&receive_at(ring, offset)->flags) & SIW_WQE_VALID;
}

/* Fills the next entry for a kernel client. Called with `fill_lock`. */
int rnic_ring_add_receive(struct rnic_ring *ring, const struct ib_recv_wr *request)
{
	u32 index = ring->fill_index & (ring->count - 1);
	struct siw_rqe *entry = (struct siw_rqe *)ring->entries + index;

	if (!ring->count || request->num_sge > SIW_MAX_SGE)
		return -EINVAL;
	if (smp_load_acquire(&entry->flags) & SIW_WQE_VALID)
		return -ENOMEM;
	entry->id = request->wr_id;
	entry->num_sge = request->num_sge;
	memcpy(entry->sge, request->sg_list, request->num_sge * sizeof(*entry->sge));
	smp_store_release(&entry->flags, SIW_WQE_VALID);
	ring->fill_index++;
	return 0;
}

/* Takes the next receive. Called with the lock of the queue pair or shared receive queue. */
bool rnic_take_receive(struct rnic_ring *ring, struct rk_receive *receive)
{
	struct siw_rqe *entry = receive_at(ring, 0);
	struct siw_rqe copy;

	if (!rnic_receive_is_posted(ring, 0))
		return false;
	copy_entry((u64 *)&copy, (const u64 *)entry, sizeof(copy));
	ring->next++;
	smp_store_release(&entry->flags, 0);
	receive->wr_id = copy.id;
	receive->num_sge = min_t(u32, copy.num_sge, SIW_MAX_SGE);
	memcpy(receive->sges, copy.sge, sizeof(copy.sge));
	return true;
}

/* Called by the engine under the queue pair's lock. */
bool iwarp_take_receive(void *owner, struct rk_receive *receive)
{
	struct rnic_qp *qp = owner;

	if (qp->base.srq)
		return rnic_srq_take(to_srq(qp->base.srq), receive);
	return rnic_take_receive(&qp->rq, receive);
}

/*
 * In the error state, flushes a limited number of the queue pair's own receives, not those of a
 * shared receive queue. Returns true if there may be more. Called with the queue pair's lock.
 */
bool rnic_flush_receives(struct rnic_qp *qp)
{
	struct rk_completion completion = {
		.status = RK_WC_WR_FLUSH_ERR,
		.opcode = RK_WC_RECV,
	};
	struct rk_receive receive;
	u32 budget;

	if (rk_qp_state(qp->engine) != RK_STATE_ERROR)
		return false;
	for (budget = RNIC_SENDS_AT_ONCE; budget; budget--) {
		if (!rnic_take_receive(&qp->rq, &receive))
			return false;
		completion.wr_id = receive.wr_id;
		iwarp_complete(qp, true, &completion);
	}
	return true;
}
