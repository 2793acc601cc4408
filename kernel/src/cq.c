// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Completion queues. The ring is shared with a program, which polls it without a system call: a
 * full entry has the flag SIW_WQE_VALID, and the program clears the flag. The program requests
 * events in the word after the last entry. The completion queue of a kernel client has the same
 * ring in private memory, with ib_verbs.h's values in the entries.
 *
 * A program that writes nonsense into its ring harms only itself: the kernel's own index selects
 * the next entry, and the kernel reads only the flags of the entry and of the request for events.
 */
#include <linux/log2.h>
#include <linux/mm.h>
#include <rdma/uverbs_ioctl.h>

#include "rnic.h"

/* A queue stays busy or crowded for this many more calls of its handler. */
#define BUSY_CALLS 64
/* A queue is crowded if more messages than this arrive for one call of its handler. */
#define CROWDED_THRESHOLD 3

/* A value of siw's interface, and the corresponding value of ib_verbs.h. */
struct value_pair {
	u16 siw;
	u16 kernel;
};

/* Indexed by the engine's WcStatus. siw's interface has no status for failed binds. */
static const struct value_pair statuses[] = {
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
static const struct value_pair opcodes[] = {
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
 * Flag of an entry of a kernel client: the entry contains immediate data. siw's interface does not
 * pass immediate data to programs.
 */
#define WITH_IMM BIT(7)

static bool is_kernel_cq(const struct rnic_cq *cq)
{
	return !cq->mapping;
}

static u16 select_value(const struct rnic_cq *cq, struct value_pair value_pair)
{
	return is_kernel_cq(cq) ? value_pair.kernel : value_pair.siw;
}

static struct siw_cqe *slot(const struct rnic_cq *cq, u32 index)
{
	return &cq->ring[index & (cq->base.cqe - 1)];
}

static u8 flags_of(const struct rnic_cq *cq, u32 flags)
{
	if (flags & RK_WC_WITH_INV)
		return SIW_WQE_REM_INVAL;
	return flags & RK_WC_WITH_IMM && is_kernel_cq(cq) ? WITH_IMM : 0;
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
	entry = slot(cq, cq->write_index);
	/* The owner has not polled the previous entry in this slot. */
	if (smp_load_acquire(&entry->flags) & SIW_WQE_VALID) {
		WRITE_ONCE(cq->overflowed, true);
		goto unlock;
	}
	cq->write_index++;
	WRITE_ONCE(entry->id, from->wr_id);
	WRITE_ONCE(entry->opcode, select_value(cq, opcodes[opcode]));
	WRITE_ONCE(entry->status, select_value(cq, statuses[status]));
	WRITE_ONCE(entry->bytes, from->byte_len);
	WRITE_ONCE(entry->imm_data, from->imm_or_stag);
	WRITE_ONCE(entry->qp_id, is_kernel_cq(cq) ? (uintptr_t)&qp->base : qp->base.qp_num);
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
static bool take_notify_request(struct rnic_cq *cq)
{
	u32 request;

	/*
	 * The program requests an event and then polls once more. So its entries must be visible
	 * before the request is read here; otherwise both sides could miss each other.
	 */
	smp_mb();
	request = READ_ONCE(cq->control->flags);
	if (!(request & SIW_NOTIFY_NEXT_COMPLETION) &&
	    !(request & SIW_NOTIFY_SOLICITED && cq->solicited))
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
	atomic_dec_return_release(&cq->pending_calls);
}

/*
 * Returns the new value of a counter of calls: restarts it if more than `threshold` messages were
 * polled since the last call of the handler, and counts down otherwise.
 */
static u32 remaining_calls(const struct rnic_cq *cq, u32 threshold, u32 remaining)
{
	if (cq->received > threshold)
		return BUSY_CALLS;
	return remaining ? remaining - 1 : 0;
}

/* Updates `busy` and `crowded`. Called with the lock, before the handler is called. */
static void update_load(struct rnic_cq *cq)
{
	cq->busy = remaining_calls(cq, 1, cq->busy);
	WRITE_ONCE(cq->crowded, remaining_calls(cq, CROWDED_THRESHOLD, cq->crowded));
	cq->received = 0;
}

/*
 * Calls the handler of a kernel client on the processor of the queue's completion vector, as the
 * interrupt of an RNIC would, so that receiving and processing use different processors. Returns
 * false if that is the current processor, or is offline.
 */
static bool call_on_vector(struct rnic_cq *cq)
{
	bool called = false;

	preempt_disable();
	if (cq->processor != smp_processor_id() && cpu_online(cq->processor)) {
		called = true;
		atomic_inc(&cq->pending_calls);
		/* This fails if a previous call has not started yet, which is sufficient. */
		if (smp_call_function_single_async(cq->processor, &cq->call))
			atomic_dec(&cq->pending_calls);
	}
	preempt_enable();
	return called;
}

/*
 * Notifies the owner of new entries. Called without the queue pair's lock, because a handler may
 * call the driver. Returns false if the queue has overflowed, which makes its queue pairs unusable.
 */
bool rnic_cq_notify(struct rnic_cq *cq)
{
	unsigned long flags;
	bool event = false, busy, overflowed, report;

	/* If another processor is writing an entry now, that processor will notify. */
	if (!READ_ONCE(cq->written) && !READ_ONCE(cq->overflowed))
		return true;
	spin_lock_irqsave(&cq->lock, flags);
	if (cq->written) {
		event = take_notify_request(cq);
		WRITE_ONCE(cq->written, false);
		cq->solicited = false;
		if (event)
			update_load(cq);
	}
	busy = cq->busy;
	overflowed = cq->overflowed;
	report = overflowed && !cq->overflow_reported;
	cq->overflow_reported = overflowed;
	spin_unlock_irqrestore(&cq->lock, flags);
	if (report)
		report_overflow(cq);
	/* Without load, the fastest reply is from the processor that received the message. */
	if (event && cq->base.comp_handler && !(busy && call_on_vector(cq)))
		call_handler(cq);
	return !overflowed;
}

/* `udata` is NULL for a kernel client. */
int rnic_create_cq(struct ib_cq *base, const struct ib_cq_init_attr *attributes,
		   struct ib_udata *udata)
{
	struct rnic_cq *cq = to_cq(base);
	struct siw_uresp_create_cq response = {};
	size_t octets;
	int result;

	if (attributes->flags)
		return -EOPNOTSUPP;
	if (!attributes->cqe || attributes->cqe > RNIC_MAX_CQE ||
	    (udata && udata->outlen < sizeof(response)))
		return -EINVAL;
	cq->processor = attributes->comp_vector % nr_cpu_ids;
	response.num_cqe = roundup_pow_of_two(attributes->cqe);
	octets = array_size(response.num_cqe, sizeof(struct siw_cqe)) + sizeof(struct siw_cq_ctrl);
	spin_lock_init(&cq->lock);
	INIT_CSD(&cq->call, call_and_count, cq);
	cq->ring = rnic_queue_memory(rnic_context_of(udata), octets, &cq->mapping,
				     &response.cq_key);
	if (!cq->ring)
		return -ENOMEM;
	cq->control = (struct siw_cq_ctrl *)&cq->ring[response.num_cqe];
	base->cqe = response.num_cqe;
	if (!udata)
		return 0;
	result = ib_copy_to_udata(udata, &response, sizeof(response));
	if (result)
		rnic_queue_memory_free(cq->ring, cq->mapping);
	return result;
}

int rnic_destroy_cq(struct ib_cq *base, struct ib_udata *udata)
{
	while (atomic_read_acquire(&to_cq(base)->pending_calls))
		cpu_relax();
	rnic_queue_memory_free(to_cq(base)->ring, to_cq(base)->mapping);
	return 0;
}

/* ---- queues of kernel clients ---- */

static bool is_full(const struct siw_cqe *entry)
{
	return smp_load_acquire(&entry->flags) & SIW_WQE_VALID;
}

static void copy_entry(struct siw_cqe *entry, struct ib_wc *completion)
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

	if (!is_kernel_cq(cq))
		return -EOPNOTSUPP;
	spin_lock_irqsave(&cq->lock, flags);
	for (taken = 0; taken < count && is_full(slot(cq, cq->read_index)); taken++) {
		copy_entry(slot(cq, cq->read_index++), &completions[taken]);
		cq->received += !!(completions[taken].opcode & IB_WC_RECV);
	}
	spin_unlock_irqrestore(&cq->lock, flags);
	return taken;
}

/*
 * Requests a call of the handler for the next completion. Returns 1 if the queue is not empty and
 * the client has set IB_CQ_REPORT_MISSED_EVENTS. Programs usually write their request into the ring
 * instead of making this system call. Any context.
 */
int rnic_req_notify_cq(struct ib_cq *base, enum ib_cq_notify_flags flags)
{
	bool solicited = (flags & IB_CQ_SOLICITED_MASK) == IB_CQ_SOLICITED;
	struct rnic_cq *cq = to_cq(base);

	smp_store_mb(cq->control->flags, solicited ? SIW_NOTIFY_SOLICITED : SIW_NOTIFY_ALL);
	return is_kernel_cq(cq) && flags & IB_CQ_REPORT_MISSED_EVENTS &&
	       is_full(slot(cq, READ_ONCE(cq->read_index)));
}

/*
 * Removes the entries of a queue pair that is being destroyed, because its client may free the
 * objects that they refer to. Moves the remaining entries together.
 */
void rnic_cq_remove_qp(struct rnic_cq *cq, const struct rnic_qp *qp)
{
	unsigned long flags;
	u32 from, to;

	if (!is_kernel_cq(cq))
		return;
	spin_lock_irqsave(&cq->lock, flags);
	for (from = to = cq->read_index; from != cq->write_index; from++) {
		struct siw_cqe entry = *slot(cq, from);

		slot(cq, from)->flags = 0;
		if (entry.base_qp != &qp->base)
			*slot(cq, to++) = entry;
	}
	cq->write_index = to;
	spin_unlock_irqrestore(&cq->lock, flags);
}
