// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Completion queues. The ring is shared with a program, which takes entries without a system call:
 * a full slot has the flag SIW_WQE_VALID, and the program clears it. The word behind the last entry
 * says whether the program wants an event. Queues of kernel clients have the same ring in private
 * memory, with ib_verbs.h's values in the entries; poll_cq takes them.
 *
 * A program that writes nonsense disturbs only itself: the kernel's own index selects the next
 * slot, and the kernel reads back only the two words of flags.
 */
#include <linux/log2.h>
#include <linux/mm.h>
#include <rdma/uverbs_ioctl.h>

#include "rnic.h"

/* A queue stays busy or crowded for this many calls of its handler. */
#define BUSY_CALLS 64
/* A queue is crowded if more messages than this arrive for one call of its handler. */
#define FEW 3

/* A value of siw's interface, and the corresponding value of ib_verbs.h. */
struct words {
	u16 siw;
	u16 kernel;
};

/* Indexed by the engine's WcStatus. siw's interface has no binds. */
static const struct words statuses[] = {
	{ SIW_WC_SUCCESS, IB_WC_SUCCESS },
	{ SIW_WC_LOC_LEN_ERR, IB_WC_LOC_LEN_ERR },
	{ SIW_WC_LOC_QP_OP_ERR, IB_WC_LOC_QP_OP_ERR },
	{ SIW_WC_LOC_PROT_ERR, IB_WC_LOC_PROT_ERR },
	{ SIW_WC_WR_FLUSH_ERR, IB_WC_WR_FLUSH_ERR },
	{ SIW_WC_GENERAL_ERR, IB_WC_MW_BIND_ERR },
	{ SIW_WC_BAD_RESP_ERR, IB_WC_BAD_RESP_ERR },
	{ SIW_WC_LOC_ACCESS_ERR, IB_WC_LOC_ACCESS_ERR },
	{ SIW_WC_REM_INV_REQ_ERR, IB_WC_REM_INV_REQ_ERR },
	{ SIW_WC_REM_ACCESS_ERR, IB_WC_REM_ACCESS_ERR },
	/* Any other status. */
	{ SIW_WC_GENERAL_ERR, IB_WC_GENERAL_ERR },
};

/* Indexed by enum rk_opcode. No client can post a bind or an atomic write. */
static const struct words opcodes[] = {
	[RK_OP_SEND] = { SIW_OP_SEND, IB_WC_SEND },
	[RK_OP_WRITE] = { SIW_OP_WRITE, IB_WC_RDMA_WRITE },
	[RK_OP_READ] = { SIW_OP_READ, IB_WC_RDMA_READ },
	[RK_OP_COMPARE_SWAP] = { SIW_OP_COMP_AND_SWAP, IB_WC_COMP_SWAP },
	[RK_OP_FETCH_ADD] = { SIW_OP_FETCH_AND_ADD, IB_WC_FETCH_ADD },
	[RK_OP_BIND] = { SIW_OP_SEND, IB_WC_SEND },
	[RK_OP_LOCAL_INVALIDATE] = { SIW_OP_INVAL_STAG, IB_WC_LOCAL_INV },
	[RK_OP_FAST_REGISTER] = { SIW_OP_REG_MR, IB_WC_REG_MR },
	[RK_OP_ATOMIC_WRITE] = { SIW_OP_WRITE, IB_WC_RDMA_WRITE },
	[RK_OP_RECEIVE] = { SIW_OP_RECEIVE, IB_WC_RECV },
	[RK_OP_RECEIVE_WRITE_IMM] = { SIW_OP_RECEIVE, IB_WC_RECV_RDMA_WITH_IMM },
};

/*
 * Flag of a kernel client's entry: it has immediate data. siw's interface does not pass these to
 * programs.
 */
#define WITH_IMM BIT(7)

static bool is_kernels(const struct rnic_cq *cq)
{
	return !cq->mapping;
}

static u16 word(const struct rnic_cq *cq, struct words words)
{
	return is_kernels(cq) ? words.kernel : words.siw;
}

static struct siw_cqe *slot(const struct rnic_cq *cq, u32 index)
{
	return &cq->ring[index & (cq->base.cqe - 1)];
}

static u8 flags_of(const struct rnic_cq *cq, u32 flags)
{
	if (flags & RK_WC_WITH_INV)
		return SIW_WQE_REM_INVAL;
	return flags & RK_WC_WITH_IMM && is_kernels(cq) ? WITH_IMM : 0;
}

/*
 * Puts a completion into the ring. The caller holds the queue pair's lock, and notifies after it
 * has dropped the lock.
 */
static void put(struct rnic_cq *cq, struct rnic_qp *qp, const struct rk_completion *from)
{
	u32 opcode = min_t(u32, from->opcode, ARRAY_SIZE(opcodes) - 1);
	u32 status = min_t(u32, from->status, ARRAY_SIZE(statuses) - 1);
	struct siw_cqe *entry;
	unsigned long flags;

	spin_lock_irqsave(&cq->lock, flags);
	entry = slot(cq, cq->next);
	/* The owner has not taken the entry that is there. */
	if (smp_load_acquire(&entry->flags) & SIW_WQE_VALID) {
		WRITE_ONCE(cq->overflowed, true);
		goto unlock;
	}
	cq->next++;
	WRITE_ONCE(entry->id, from->wr_id);
	WRITE_ONCE(entry->opcode, word(cq, opcodes[opcode]));
	WRITE_ONCE(entry->status, word(cq, statuses[status]));
	WRITE_ONCE(entry->bytes, from->byte_len);
	WRITE_ONCE(entry->imm_data, from->imm_or_stag);
	WRITE_ONCE(entry->qp_id, is_kernels(cq) ? (uintptr_t)&qp->base : qp->base.qp_num);
	smp_store_release(&entry->flags, SIW_WQE_VALID | flags_of(cq, from->flags));
	WRITE_ONCE(cq->written, true);
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

/*
 * Clears the program's request for an event if the new entries satisfy it. Returns true if they do.
 */
static bool wanted(struct rnic_cq *cq)
{
	u32 wish;

	/*
	 * The program requests an event and then polls once more, so the entries must be visible
	 * before the request is read.
	 */
	smp_mb();
	wish = READ_ONCE(cq->control->flags);
	if (!(wish & SIW_NOTIFY_NEXT_COMPLETION) && !(wish & SIW_NOTIFY_SOLICITED && cq->solicited))
		return false;
	WRITE_ONCE(cq->control->flags, SIW_NOTIFY_NOT);
	return true;
}

static void report_overflow(struct rnic_cq *cq)
{
	struct ib_event event = {
		.device = cq->base.device,
		.element.cq = &cq->base,
		.event = IB_EVENT_CQ_ERR,
	};

	if (cq->base.event_handler)
		cq->base.event_handler(&event, cq->base.cq_context);
}

static void call_handler(void *info)
{
	struct rnic_cq *cq = info;

	cq->base.comp_handler(&cq->base, cq->base.cq_context);
}

static void call_and_count(void *info)
{
	struct rnic_cq *cq = info;

	call_handler(cq);
	/* The queue may be freed after this. */
	atomic_dec_return_release(&cq->calls);
}

/*
 * Returns for how many more calls of the handler the queue is busy or crowded, if more than `few`
 * messages in a call make it so.
 */
static u32 calls_left(const struct rnic_cq *cq, u32 few, u32 left)
{
	if (cq->received > few)
		return BUSY_CALLS;
	return left ? left - 1 : 0;
}

/*
 * Records whether messages arrive faster than the client takes them. Called with the lock, when the
 * handler is due.
 */
static void judge_load(struct rnic_cq *cq)
{
	cq->busy = calls_left(cq, 1, cq->busy);
	WRITE_ONCE(cq->crowded, calls_left(cq, FEW, cq->crowded));
	cq->received = 0;
}

/*
 * Calls the handler of a kernel client on the processor of the queue's completion vector, as the
 * interrupt of an RNIC would, so that receiving and processing use different processors. Returns
 * false if this is that processor, or if it is offline.
 */
static bool call_elsewhere(struct rnic_cq *cq)
{
	bool called = false;

	preempt_disable();
	if (cq->processor != smp_processor_id() && cpu_online(cq->processor)) {
		called = true;
		atomic_inc(&cq->calls);
		/* A call that has not started yet is sufficient. */
		if (smp_call_function_single_async(cq->processor, &cq->call))
			atomic_dec(&cq->calls);
	}
	preempt_enable();
	return called;
}

/*
 * Notifies the owner of new entries. Called without the queue pair's lock, because a handler may
 * call back. Returns false if the queue has overflowed: its queue pairs are unusable then.
 */
bool rnic_cq_notify(struct rnic_cq *cq)
{
	unsigned long flags;
	bool event = false, busy, overflowed, report;

	/* An entry that another processor writes now is reported by that processor. */
	if (!READ_ONCE(cq->written) && !READ_ONCE(cq->overflowed))
		return true;
	spin_lock_irqsave(&cq->lock, flags);
	if (cq->written) {
		event = wanted(cq);
		WRITE_ONCE(cq->written, false);
		cq->solicited = false;
		if (event)
			judge_load(cq);
	}
	busy = cq->busy;
	overflowed = cq->overflowed;
	report = overflowed && !cq->overflow_reported;
	cq->overflow_reported = overflowed;
	spin_unlock_irqrestore(&cq->lock, flags);
	if (report)
		report_overflow(cq);
	/* A single small request is answered fastest on the processor that received it. */
	if (event && cq->base.comp_handler && !(busy && call_elsewhere(cq)))
		call_handler(cq);
	return !overflowed;
}

/* `udata` is NULL for a kernel client. */
int rnic_create_cq(struct ib_cq *base, const struct ib_cq_init_attr *attributes,
		   struct ib_udata *udata)
{
	struct rnic_cq *cq = to_cq(base);
	struct siw_uresp_create_cq answer = {};
	size_t octets;
	int result;

	if (attributes->flags)
		return -EOPNOTSUPP;
	if (!attributes->cqe || attributes->cqe > RNIC_MAX_CQE ||
	    (udata && udata->outlen < sizeof(answer)))
		return -EINVAL;
	cq->processor = attributes->comp_vector % nr_cpu_ids;
	answer.num_cqe = roundup_pow_of_two(attributes->cqe);
	octets = array_size(answer.num_cqe, sizeof(struct siw_cqe)) + sizeof(struct siw_cq_ctrl);
	spin_lock_init(&cq->lock);
	INIT_CSD(&cq->call, call_and_count, cq);
	cq->ring = rnic_queue_memory(rnic_context_of(udata), octets, &cq->mapping, &answer.cq_key);
	if (!cq->ring)
		return -ENOMEM;
	cq->control = (struct siw_cq_ctrl *)&cq->ring[answer.num_cqe];
	base->cqe = answer.num_cqe;
	if (!udata)
		return 0;
	result = ib_copy_to_udata(udata, &answer, sizeof(answer));
	if (result)
		rnic_queue_memory_free(cq->ring, cq->mapping);
	return result;
}

int rnic_destroy_cq(struct ib_cq *base, struct ib_udata *udata)
{
	while (atomic_read_acquire(&to_cq(base)->calls))
		cpu_relax();
	rnic_queue_memory_free(to_cq(base)->ring, to_cq(base)->mapping);
	return 0;
}

/* ---- queues of kernel clients ---- */

static bool is_full(const struct siw_cqe *entry)
{
	return smp_load_acquire(&entry->flags) & SIW_WQE_VALID;
}

static void hand_over(struct siw_cqe *entry, struct ib_wc *completion)
{
	*completion = (struct ib_wc){
		.wr_id = entry->id,
		.status = entry->status,
		.opcode = entry->opcode,
		.byte_len = entry->bytes,
		.qp = entry->base_qp,
		.port_num = RNIC_PORT,
	};
	if (entry->flags & SIW_WQE_REM_INVAL) {
		completion->wc_flags = IB_WC_WITH_INVALIDATE;
		completion->ex.invalidate_rkey = entry->inval_stag;
	} else if (entry->flags & WITH_IMM) {
		completion->wc_flags = IB_WC_WITH_IMM;
		completion->ex.imm_data = cpu_to_be32(entry->imm_data);
	}
	smp_store_release(&entry->flags, 0);
}

/* Any context. */
int rnic_poll_cq(struct ib_cq *base, int count, struct ib_wc *completions)
{
	struct rnic_cq *cq = to_cq(base);
	unsigned long flags;
	int taken;

	if (!is_kernels(cq))
		return -EOPNOTSUPP;
	spin_lock_irqsave(&cq->lock, flags);
	for (taken = 0; taken < count && is_full(slot(cq, cq->taken)); taken++) {
		hand_over(slot(cq, cq->taken++), &completions[taken]);
		cq->received += !!(completions[taken].opcode & IB_WC_RECV);
	}
	spin_unlock_irqrestore(&cq->lock, flags);
	return taken;
}

/*
 * Requests a call at the next completion. Returns 1 if entries are there already and the client
 * wants to know. Programs write their request into the ring; this is the equivalent system call.
 * Any context.
 */
int rnic_req_notify_cq(struct ib_cq *base, enum ib_cq_notify_flags flags)
{
	bool solicited = (flags & IB_CQ_SOLICITED_MASK) == IB_CQ_SOLICITED;
	struct rnic_cq *cq = to_cq(base);

	smp_store_mb(cq->control->flags, solicited ? SIW_NOTIFY_SOLICITED : SIW_NOTIFY_ALL);
	return is_kernels(cq) && flags & IB_CQ_REPORT_MISSED_EVENTS &&
	       is_full(slot(cq, READ_ONCE(cq->taken)));
}

/*
 * Removes the entries of a queue pair that is being destroyed, because its client may free what
 * they refer to. The others move up.
 */
void rnic_cq_forget(struct rnic_cq *cq, const struct rnic_qp *qp)
{
	unsigned long flags;
	u32 from, to;

	if (!is_kernels(cq))
		return;
	spin_lock_irqsave(&cq->lock, flags);
	for (from = to = cq->taken; from != cq->next; from++) {
		struct siw_cqe entry = *slot(cq, from);

		slot(cq, from)->flags = 0;
		if (entry.base_qp != &qp->base)
			*slot(cq, to++) = entry;
	}
	cq->next = to;
	spin_unlock_irqrestore(&cq->lock, flags);
}
