// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Completion queues. The ring is shared with a program, which takes entries without a system call: a full slot has the flag
 * SIW_WQE_VALID, and the program clears it. The word behind the last entry says when the program wants an event.
 *
 * What the program writes there can disturb itself only: the kernel's own index decides where the next entry goes, and the kernel reads
 * nothing back but the two words of flags.
 */
#include <linux/log2.h>
#include <rdma/uverbs_ioctl.h>

#include "rnic.h"

/* Outcomes as the engine numbers them (WcStatus), and siw's word for each. */
static const u16 siw_status[] = {
	SIW_WC_SUCCESS,
	SIW_WC_LOC_LEN_ERR,
	SIW_WC_LOC_QP_OP_ERR,
	SIW_WC_LOC_PROT_ERR,
	SIW_WC_WR_FLUSH_ERR,
	SIW_WC_GENERAL_ERR,		/* of a bind, which siw's interface does not have */
	SIW_WC_BAD_RESP_ERR,
	SIW_WC_LOC_ACCESS_ERR,
	SIW_WC_REM_INV_REQ_ERR,
	SIW_WC_REM_ACCESS_ERR,
};

/* Operations as the engine numbers them (WcOpcode), and siw's word for each. */
static const u8 siw_opcode[] = {
	SIW_OP_SEND,
	SIW_OP_WRITE,
	SIW_OP_READ,
	SIW_OP_COMP_AND_SWAP,
	SIW_OP_FETCH_AND_ADD,
	SIW_OP_SEND,			/* of a bind, which siw's interface does not have */
	SIW_OP_INVAL_STAG,
	SIW_OP_REG_MR,
	SIW_OP_RECEIVE,
	SIW_OP_RECEIVE,
};

/* Puts a completion into the ring. The caller holds the queue pair's lock, and notifies when it has dropped that. */
static void put(struct rnic_cq *cq, struct rnic_qp *qp, const struct rk_completion *from)
{
	struct siw_cqe *entry;
	unsigned long flags;

	spin_lock_irqsave(&cq->lock, flags);
	entry = &cq->ring[cq->next & (cq->base.cqe - 1)];
	/* The program has not taken what is there. */
	if (smp_load_acquire(&entry->flags) & SIW_WQE_VALID) {
		cq->overflowed = true;
		goto unlock;
	}
	cq->next++;
	WRITE_ONCE(entry->id, from->wr_id);
	WRITE_ONCE(entry->opcode,
		   from->opcode < ARRAY_SIZE(siw_opcode) ? siw_opcode[from->opcode] : SIW_OP_SEND);
	WRITE_ONCE(entry->status,
		   from->status < ARRAY_SIZE(siw_status) ? siw_status[from->status] : SIW_WC_GENERAL_ERR);
	WRITE_ONCE(entry->bytes, from->byte_len);
	WRITE_ONCE(entry->imm_data, from->imm_or_stag);
	WRITE_ONCE(entry->qp_id, qp->base.qp_num);
	smp_store_release(&entry->flags,
			  SIW_WQE_VALID | (from->flags & RK_WC_WITH_INV ? SIW_WQE_REM_INVAL : 0));
	cq->written = true;
	cq->solicited |= from->status || from->flags & RK_WC_SOLICITED;
unlock:
	spin_unlock_irqrestore(&cq->lock, flags);
}

void iwarp_complete(void *owner, int receive, const struct rk_completion *completion)
{
	struct rnic_qp *qp = owner;
	struct ib_cq *cq = receive ? qp->base.recv_cq : qp->base.send_cq;

	put(to_cq(cq), qp, completion);
}

/* Takes the wish for an event, if what was written fulfils it. */
static bool wanted(struct rnic_cq *cq)
{
	u32 wish;

	/* The program asks, and then looks for entries once more; so the entries come before this look at its wish. */
	smp_mb();
	wish = READ_ONCE(cq->control->flags);
	if (!(wish & SIW_NOTIFY_NEXT_COMPLETION) && !(wish & SIW_NOTIFY_SOLICITED && cq->solicited))
		return false;
	WRITE_ONCE(cq->control->flags, SIW_NOTIFY_NOT);
	return true;
}

static void tell_overflow(struct rnic_cq *cq)
{
	struct ib_event event = {
		.device = cq->base.device,
		.element.cq = &cq->base,
		.event = IB_EVENT_CQ_ERR,
	};

	if (cq->base.event_handler)
		cq->base.event_handler(&event, cq->base.cq_context);
}

/*
 * Tells about what was written. Called without the queue pair's lock, because a handler may call back. Returns false if the queue has
 * overflowed: its queue pairs are no good any more.
 */
bool rnic_cq_notify(struct rnic_cq *cq)
{
	unsigned long flags;
	bool event = false, overflowed, tell;

	spin_lock_irqsave(&cq->lock, flags);
	if (cq->written) {
		event = wanted(cq);
		cq->written = false;
		cq->solicited = false;
	}
	overflowed = cq->overflowed;
	tell = overflowed && !cq->overflow_told;
	cq->overflow_told = overflowed;
	spin_unlock_irqrestore(&cq->lock, flags);
	if (tell)
		tell_overflow(cq);
	if (event && cq->base.comp_handler)
		cq->base.comp_handler(&cq->base, cq->base.cq_context);
	return !overflowed;
}

int rnic_create_cq(struct ib_cq *base, const struct ib_cq_init_attr *attributes,
		   struct ib_udata *udata)
{
	struct rnic_ucontext *context =
		rdma_udata_to_drv_context(udata, struct rnic_ucontext, base);
	struct rnic_cq *cq = to_cq(base);
	struct siw_uresp_create_cq answer = {};
	size_t octets;
	int result;

	if (attributes->flags)
		return -EOPNOTSUPP;
	if (!attributes->cqe || attributes->cqe > RNIC_MAX_CQE || udata->outlen < sizeof(answer))
		return -EINVAL;
	answer.num_cqe = roundup_pow_of_two(attributes->cqe);
	octets = array_size(answer.num_cqe, sizeof(struct siw_cqe)) + sizeof(struct siw_cq_ctrl);
	spin_lock_init(&cq->lock);
	cq->ring = rnic_share(context, octets, &cq->mapping, &answer.cq_key);
	if (!cq->ring)
		return -ENOMEM;
	cq->control = (struct siw_cq_ctrl *)&cq->ring[answer.num_cqe];
	base->cqe = answer.num_cqe;
	result = ib_copy_to_udata(udata, &answer, sizeof(answer));
	if (result)
		rdma_user_mmap_entry_remove(cq->mapping);
	return result;
}

int rnic_destroy_cq(struct ib_cq *base, struct ib_udata *udata)
{
	rdma_user_mmap_entry_remove(to_cq(base)->mapping);
	return 0;
}

/* Kernel clients have no queues here yet. */
int rnic_poll_cq(struct ib_cq *base, int count, struct ib_wc *completions)
{
	return -EOPNOTSUPP;
}

/* Programs write their wish themselves; this is for those that ask by the system call. */
int rnic_req_notify_cq(struct ib_cq *base, enum ib_cq_notify_flags flags)
{
	bool solicited = (flags & IB_CQ_SOLICITED_MASK) == IB_CQ_SOLICITED;

	smp_store_mb(to_cq(base)->control->flags,
		     solicited ? SIW_NOTIFY_SOLICITED : SIW_NOTIFY_ALL);
	return 0;
}
