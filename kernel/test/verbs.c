// SPDX-License-Identifier: MIT OR Apache-2.0
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/delay.h>
#include <linux/hrtimer.h>

#include "client.h"

/*
 * Maps a part of the buffer to the region, and prepares the request that registers it with a new
 * key.
 */
static int prepare_registration(struct endpoint *ep, struct ib_reg_wr *request, u32 from, u32 len)
{
	struct scatterlist list[2];
	u32 first = len / 2;

	/* Two pieces, which meet at any offset in a page. */
	sg_init_table(list, 2);
	sg_set_buf(&list[0], ep->buffer + from, first);
	sg_set_buf(&list[1], ep->buffer + from + first, len - first);
	EXPECT(ib_dma_map_sg(ep->id->device, list, 2, DMA_BIDIRECTIONAL) == 2);
	EXPECT(ib_map_mr_sg(ep->mr, list, 2, NULL, PAGE_SIZE) == 2);
	EXPECT(ep->mr->length == len);
	ib_update_fast_reg_key(ep->mr, ib_inc_rkey(ep->mr->rkey));
	*request = (struct ib_reg_wr){
		.wr.opcode = IB_WR_REG_MR,
		.mr = ep->mr,
		.key = ep->mr->rkey,
		.access = IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE | IB_ACCESS_REMOTE_READ,
	};
	return 0;
}

static void fill(u8 *at, size_t len, u32 seed)
{
	size_t i;

	for (i = 0; i < len; i++)
		at[i] = (seed + i * 2654435761u) >> 13;
}

static int sends(struct pair *pair)
{
	u32 i;

	for (i = 0; i < 4; i++) {
		EXPECT(!post_receive(&pair->b, i, i * 8192, 8192));
		EXPECT(!post_receive(&pair->a, i, 32768 + i * 8192, 8192));
	}
	fill(pair->a.buffer, 32768, 1);
	for (i = 0; i < 4; i++) {
		EXPECT(!post_send(&pair->a, 100 + i, i * 8192, 8192 - i, 0));
		EXPECT(!expect(&pair->a, 100 + i, IB_WC_SEND));
		EXPECT(!expect(&pair->b, i, IB_WC_RECV));
		EXPECT(!memcmp(pair->a.buffer + i * 8192, pair->b.buffer + i * 8192, 8192 - i));
		EXPECT(!post_send(&pair->b, 200 + i, i * 8192, 8192, 0));
		EXPECT(!expect(&pair->b, 200 + i, IB_WC_SEND));
		EXPECT(!expect(&pair->a, i, IB_WC_RECV));
	}
	return memcmp(pair->a.buffer + 32768, pair->b.buffer, 32768) ? -EIO : 0;
}

/* A client may change inline data as soon as the post returns. */
static int inline_send(struct pair *pair)
{
	u8 sent[64];

	EXPECT(!post_receive(&pair->b, 1, 0, 64));
	fill(pair->a.buffer, 64, 2);
	memcpy(sent, pair->a.buffer, 64);
	EXPECT(!post_send(&pair->a, 2, 0, 64, IB_SEND_INLINE));
	memset(pair->a.buffer, 0, 64);
	EXPECT(post_send(&pair->a, 2, 0, 4096, IB_SEND_INLINE));
	EXPECT(!expect(&pair->a, 2, IB_WC_SEND));
	EXPECT(!expect(&pair->b, 1, IB_WC_RECV));
	return memcmp(pair->b.buffer, sent, 64) ? -EIO : 0;
}

/*
 * Each request for an event causes at most one call of the handler. If completions are already in
 * the queue, ib_req_notify_cq() returns 1.
 */
static int event_requests(struct pair *pair)
{
	struct endpoint *b = &pair->b;
	u32 i;

	for (i = 0; i < 4; i++)
		EXPECT(!post_receive(b, i, 0, 64));
	EXPECT(!ib_req_notify_cq(b->cq, IB_CQ_SOLICITED));
	EXPECT(!post_send(&pair->a, 9, 0, 64, 0));
	EXPECT(!expect(&pair->a, 9, IB_WC_SEND));
	EXPECT(!expect(b, 0, IB_WC_RECV));
	EXPECT(!atomic_read(&b->calls));
	EXPECT(!post_send(&pair->a, 9, 0, 64, IB_SEND_SOLICITED));
	EXPECT(!post_send(&pair->a, 9, 0, 64, IB_SEND_SOLICITED));
	EXPECT(!expect(b, 1, IB_WC_RECV));
	EXPECT(!expect(b, 2, IB_WC_RECV));
	EXPECT(atomic_read(&b->calls) == 1);
	EXPECT(!ib_req_notify_cq(b->cq, IB_CQ_NEXT_COMP | IB_CQ_REPORT_MISSED_EVENTS));
	EXPECT(!post_send(&pair->a, 9, 0, 64, 0));
	EXPECT(!await_calls(b, 2));
	EXPECT(ib_req_notify_cq(b->cq, IB_CQ_NEXT_COMP | IB_CQ_REPORT_MISSED_EVENTS) == 1);
	return expect(b, 3, IB_WC_RECV);
}

/*
 * A registration, and the Send that announces it, are posted as one list. The peer writes to the
 * region, reads it, and invalidates it. Its next Read is refused.
 */
static int registration(struct pair *pair)
{
	const u32 from = 1000, len = 20000;
	struct endpoint *a = &pair->a, *b = &pair->b;
	struct ib_sge sge = part(a, 0, 64);
	struct ib_send_wr send = {
		.wr_id = 1,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IB_WR_SEND,
		.send_flags = IB_SEND_SIGNALED,
	};
	struct ib_reg_wr request;
	struct ib_wc wc;

	EXPECT(!prepare_registration(a, &request, from, len));
	request.wr.next = &send;
	EXPECT(!post_receive(b, 2, 0, 64));
	EXPECT(!ib_post_send(a->id->qp, &request.wr, NULL));
	EXPECT(!expect(a, 1, IB_WC_SEND));
	EXPECT(!expect(b, 2, IB_WC_RECV));
	fill(b->buffer, len, 3);
	EXPECT(!post_rdma(b, IB_WR_RDMA_WRITE, 3, part(b, 0, len), a->mr->iova, a->mr->rkey));
	EXPECT(!expect(b, 3, IB_WC_RDMA_WRITE));
	EXPECT(!post_rdma(b, IB_WR_RDMA_READ, 4, part(b, 32768, len), a->mr->iova, a->mr->rkey));
	EXPECT(!expect(b, 4, IB_WC_RDMA_READ));
	EXPECT(!memcmp(b->buffer, a->buffer + from, len));
	EXPECT(!memcmp(b->buffer, b->buffer + 32768, len));
	EXPECT(!post_receive(a, 5, 40000, 64));
	sge = part(b, 0, 64);
	send.opcode = IB_WR_SEND_WITH_INV;
	send.ex.invalidate_rkey = a->mr->rkey;
	EXPECT(!ib_post_send(b->id->qp, &send, NULL));
	EXPECT(!expect(b, 1, IB_WC_SEND));
	EXPECT(!next_completion(a, &wc));
	EXPECT(wc.wr_id == 5 && !wc.status && wc.wc_flags == IB_WC_WITH_INVALIDATE);
	EXPECT(wc.ex.invalidate_rkey == a->mr->rkey);
	EXPECT(!post_rdma(b, IB_WR_RDMA_READ, 6, part(b, 32768, len), a->mr->iova, a->mr->rkey));
	EXPECT(!next_completion(b, &wc));
	EXPECT(wc.wr_id == 6 && wc.status == IB_WC_REM_ACCESS_ERR);
	return 0;
}

static int expect_immediate(struct endpoint *ep, u64 wr_id, enum ib_wc_opcode opcode, u32 data)
{
	struct ib_wc wc;

	EXPECT(!next_completion(ep, &wc));
	EXPECT(wc.status == IB_WC_SUCCESS && wc.wr_id == wr_id && wc.opcode == opcode);
	EXPECT(wc.wc_flags == IB_WC_WITH_IMM && wc.ex.imm_data == cpu_to_be32(data));
	return 0;
}

/*
 * Immediate data arrive with a Write, with an empty Write, and with a Send. A receive for a Write's
 * immediate data needs no memory.
 */
static int immediate(struct pair *pair)
{
	const u32 from = 1000, len = 20000;
	struct endpoint *a = &pair->a, *b = &pair->b;
	struct ib_recv_wr empty = {};
	struct ib_sge sge = part(b, 0, len);
	struct ib_rdma_wr write = {
		.wr = {
			.wr_id = 10,
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = IB_WR_RDMA_WRITE_WITH_IMM,
			.send_flags = IB_SEND_SIGNALED,
			.ex.imm_data = cpu_to_be32(0x01020304),
		},
	};
	struct ib_reg_wr request;

	for (empty.wr_id = 0; empty.wr_id < 2; empty.wr_id++)
		EXPECT(!ib_post_recv(a->id->qp, &empty, NULL));
	EXPECT(!post_receive(a, 2, 40000, 64));
	EXPECT(!prepare_registration(a, &request, from, len));
	EXPECT(!ib_post_send(a->id->qp, &request.wr, NULL));
	fill(b->buffer, len, 7);
	write.remote_addr = a->mr->iova;
	write.rkey = a->mr->rkey;
	EXPECT(!ib_post_send(b->id->qp, &write.wr, NULL));
	EXPECT(!expect(b, 10, IB_WC_RDMA_WRITE));
	EXPECT(!expect_immediate(a, 0, IB_WC_RECV_RDMA_WITH_IMM, 0x01020304));
	EXPECT(!memcmp(a->buffer + from, b->buffer, len));
	/* A Write without data. */
	write.wr.sg_list = NULL;
	write.wr.num_sge = 0;
	write.wr.ex.imm_data = cpu_to_be32(5);
	write.remote_addr = 0;
	write.rkey = 0;
	EXPECT(!ib_post_send(b->id->qp, &write.wr, NULL));
	EXPECT(!expect(b, 10, IB_WC_RDMA_WRITE));
	EXPECT(!expect_immediate(a, 1, IB_WC_RECV_RDMA_WITH_IMM, 5));
	sge.length = 64;
	write.wr.sg_list = &sge;
	write.wr.num_sge = 1;
	write.wr.opcode = IB_WR_SEND_WITH_IMM;
	write.wr.ex.imm_data = cpu_to_be32(0xfffefdfc);
	EXPECT(!ib_post_send(b->id->qp, &write.wr, NULL));
	EXPECT(!expect(b, 10, IB_WC_SEND));
	EXPECT(!expect_immediate(a, 2, IB_WC_RECV, 0xfffefdfc));
	return memcmp(a->buffer + 40000, b->buffer, 64) ? -EIO : 0;
}

/* Registers pages, accesses them, and invalidates the registration by a request, repeatedly. */
static int local_invalidation(struct pair *pair)
{
	struct endpoint *a = &pair->a, *b = &pair->b;
	struct ib_reg_wr request;
	u32 i;

	for (i = 0; i < 20; i++) {
		struct ib_send_wr invalidation = {
			.wr_id = 2,
			.opcode = IB_WR_LOCAL_INV,
			.send_flags = IB_SEND_SIGNALED,
		};

		EXPECT(!prepare_registration(a, &request, i * 100, 8000));
		request.wr.wr_id = 1;
		request.wr.send_flags = IB_SEND_SIGNALED;
		EXPECT(!ib_post_send(a->id->qp, &request.wr, NULL));
		EXPECT(!expect(a, 1, IB_WC_REG_MR));
		fill(b->buffer, 8000, i);
		EXPECT(!post_rdma(b, IB_WR_RDMA_WRITE, 3, part(b, 0, 8000), a->mr->iova,
				  a->mr->rkey));
		/* When the Read after the Write completes, the Write's data are in place. */
		EXPECT(!post_rdma(b, IB_WR_RDMA_READ, 4, part(b, 20000, 8000), a->mr->iova,
				  a->mr->rkey));
		EXPECT(!expect(b, 3, IB_WC_RDMA_WRITE));
		EXPECT(!expect(b, 4, IB_WC_RDMA_READ));
		EXPECT(!memcmp(a->buffer + i * 100, b->buffer, 8000));
		EXPECT(!memcmp(b->buffer + 20000, b->buffer, 8000));
		invalidation.ex.invalidate_rkey = a->mr->rkey;
		EXPECT(!ib_post_send(a->id->qp, &invalidation, NULL));
		EXPECT(!expect(a, 2, IB_WC_LOCAL_INV));
	}
	return 0;
}

static int register_pages(struct endpoint *ep, u32 from, u32 len)
{
	struct ib_reg_wr request;

	EXPECT(!prepare_registration(ep, &request, from, len));
	request.wr.wr_id = 1;
	request.wr.send_flags = IB_SEND_SIGNALED;
	EXPECT(!ib_post_send(ep->id->qp, &request.wr, NULL));
	return expect(ep, 1, IB_WC_REG_MR);
}

/*
 * A Read places data in registered pages, and then invalidates the registration, so the pages can
 * be registered again immediately. A Read into an invalid registration fails.
 */
static int read_with_invalidate(struct pair *pair)
{
	const u32 len = 20000;
	struct endpoint *a = &pair->a, *b = &pair->b;
	struct ib_sge sink;
	struct ib_wc wc;
	u32 i;

	EXPECT(!register_pages(b, 100, len));
	for (i = 0; i < 20; i++) {
		EXPECT(!register_pages(a, i * 100, len));
		sink = (struct ib_sge){
			.addr = a->mr->iova,
			.length = len,
			.lkey = a->mr->lkey,
		};
		fill(b->buffer + 100, len, i);
		EXPECT(!post_rdma(a, IB_WR_RDMA_READ_WITH_INV, 3, sink, b->mr->iova, b->mr->rkey));
		EXPECT(!expect(a, 3, IB_WC_RDMA_READ));
		EXPECT(!memcmp(a->buffer + i * 100, b->buffer + 100, len));
	}
	EXPECT(!post_rdma(a, IB_WR_RDMA_READ, 4, sink, b->mr->iova, b->mr->rkey));
	EXPECT(!next_completion(a, &wc));
	EXPECT(wc.wr_id == 4 && wc.status == IB_WC_LOC_PROT_ERR);
	return 0;
}

/* Requests that are posted with interrupts off are sent later, and complete. */
static int post_with_interrupts_off(struct pair *pair)
{
	unsigned long flags;
	int i, result;

	for (i = 0; i < 20; i++) {
		fill(pair->a.buffer, 1000, i);
		local_irq_save(flags);
		result = post_receive(&pair->b, i, 0, 1000);
		if (!result)
			result = post_send(&pair->a, 50, 0, 1000, 0);
		local_irq_restore(flags);
		EXPECT(!result);
		EXPECT(!expect(&pair->a, 50, IB_WC_SEND));
		EXPECT(!expect(&pair->b, i, IB_WC_RECV));
		EXPECT(!memcmp(pair->a.buffer, pair->b.buffer, 1000));
	}
	return 0;
}

/* A timer that posts a Send in softirq. */
struct ticker {
	struct hrtimer timer;
	struct pair *pair;
	int result;
	struct completion done;
};

static enum hrtimer_restart tick(struct hrtimer *timer)
{
	struct ticker *ticker = container_of(timer, struct ticker, timer);

	ticker->result = post_send(&ticker->pair->a, 60, 0, 1000, 0);
	complete(&ticker->done);
	return HRTIMER_NORESTART;
}

static int post_in_softirq(struct pair *pair)
{
	struct ticker ticker = { .pair = pair };
	int i;

	hrtimer_init_on_stack(&ticker.timer, CLOCK_MONOTONIC, HRTIMER_MODE_REL_SOFT);
	ticker.timer.function = tick;
	for (i = 0; i < 20; i++) {
		init_completion(&ticker.done);
		EXPECT(!post_receive(&pair->b, i, 0, 1000));
		hrtimer_start(&ticker.timer, ns_to_ktime(100 * NSEC_PER_USEC),
			      HRTIMER_MODE_REL_SOFT);
		wait_for_completion(&ticker.done);
		EXPECT(!ticker.result);
		EXPECT(!expect(&pair->a, 60, IB_WC_SEND));
		EXPECT(!expect(&pair->b, i, IB_WC_RECV));
	}
	hrtimer_cancel(&ticker.timer);
	destroy_hrtimer_on_stack(&ticker.timer);
	return 0;
}

/* A timer that posts Sends in a hard interrupt, as a disk driver does. */
#define INTERRUPTS 2000
/* Maximum number of outstanding Sends. */
#define OUTSTANDING 8
#define INTERRUPT_WR_ID 70

struct disk {
	struct hrtimer timer;
	struct endpoint *poster;
	atomic_t free_slots;
	int posted;
	int result;
};

static enum hrtimer_restart interrupt(struct hrtimer *timer)
{
	struct disk *disk = container_of(timer, struct disk, timer);

	if (atomic_dec_if_positive(&disk->free_slots) >= 0) {
		disk->result |= post_send(disk->poster, INTERRUPT_WR_ID, 0, 8, 0);
		WRITE_ONCE(disk->posted, disk->posted + 1);
	}
	hrtimer_forward_now(timer, ns_to_ktime(50 * NSEC_PER_USEC));
	return disk->posted < INTERRUPTS ? HRTIMER_RESTART : HRTIMER_NORESTART;
}

/*
 * Polls and counts completions, and replaces each receive. When a Send of the interrupt completes,
 * the interrupt may post another one.
 */
static int take(struct endpoint *ep, struct disk *disk, int *sent, int *received)
{
	struct ib_wc wc;

	while (ib_poll_cq(ep->cq, 1, &wc)) {
		EXPECT(wc.status == IB_WC_SUCCESS);
		if (wc.opcode == IB_WC_RECV) {
			EXPECT(!post_receive(ep, 1, 4096, 64));
			++*received;
		} else {
			++*sent;
		}
		if (wc.wr_id == INTERRUPT_WR_ID)
			atomic_inc(&disk->free_slots);
	}
	return 0;
}

/*
 * Sends from `a`, on the processor of the interrupt, until the interrupt has posted all Sends and
 * all messages have arrived.
 */
static int send_during_interrupts(struct pair *pair, struct disk *disk)
{
	int from_a = 0, at_b = 0, from_b = 0, at_a = 0, posted = 0;
	unsigned long limit = jiffies + PATIENCE;

	while (READ_ONCE(disk->posted) < INTERRUPTS || from_b < INTERRUPTS || at_a < INTERRUPTS ||
	       at_b < posted || from_a < posted) {
		EXPECT(time_before(jiffies, limit));
		if (READ_ONCE(disk->posted) < INTERRUPTS && posted - at_b < OUTSTANDING &&
		    posted - from_a < OUTSTANDING) {
			EXPECT(!post_send(&pair->a, 1, 0, 64, 0));
			posted++;
		}
		EXPECT(!take(&pair->a, disk, &from_a, &at_a));
		EXPECT(!take(&pair->b, disk, &from_b, &at_b));
		cond_resched();
	}
	return disk->result;
}

/* Interrupts that post arrive at any time, also while their processor holds the lock. */
static int post_in_interrupts(struct pair *pair)
{
	struct disk disk = { .poster = &pair->b, .free_slots = ATOMIC_INIT(OUTSTANDING) };
	int i, result;

	for (i = 0; i < 3 * OUTSTANDING; i++) {
		EXPECT(!post_receive(&pair->a, 1, 4096, 64));
		EXPECT(!post_receive(&pair->b, 1, 4096, 64));
	}
	hrtimer_init_on_stack(&disk.timer, CLOCK_MONOTONIC, HRTIMER_MODE_REL_PINNED_HARD);
	disk.timer.function = interrupt;
	migrate_disable();
	hrtimer_start(&disk.timer, ns_to_ktime(50 * NSEC_PER_USEC), HRTIMER_MODE_REL_PINNED_HARD);
	result = send_during_interrupts(pair, &disk);
	migrate_enable();
	hrtimer_cancel(&disk.timer);
	destroy_hrtimer_on_stack(&disk.timer);
	return result;
}

/*
 * Sends several messages before any of them is polled. Returns the processor that ran the
 * completion handler, or an error.
 */
static int handler_processor(struct pair *pair, int messages)
{
	struct endpoint *b = &pair->b;
	int i, calls = atomic_read(&b->calls);

	for (i = 0; i < messages; i++)
		EXPECT(!post_receive(b, i, 0, 64));
	EXPECT(!ib_req_notify_cq(b->cq, IB_CQ_NEXT_COMP));
	for (i = 0; i < messages; i++)
		EXPECT(!post_send(&pair->a, i, 0, 64, 0));
	for (i = 0; i < messages; i++)
		EXPECT(!expect(&pair->a, i, IB_WC_SEND));
	EXPECT(!await_calls(b, calls + 1));
	for (i = 0; i < messages; i++)
		EXPECT(!expect(b, i, IB_WC_RECV));
	return READ_ONCE(b->processor);
}

/*
 * Under load, the handler runs on the completion vector's processor. Without load, it runs on the
 * processor where the message arrived.
 */
static int vectors_under_load(struct pair *pair)
{
	int i, result, elsewhere = 0;

	if (!cpu_online(VECTOR))
		return 0;
	for (i = 0; i < 10; i++) {
		result = handler_processor(pair, 8);
		EXPECT(result >= 0);
		result = handler_processor(pair, 1);
		EXPECT(result == VECTOR);
	}
	/* The load has ended; some calls later, the handler moves back. */
	for (i = 0; i < 200; i++) {
		result = handler_processor(pair, 1);
		EXPECT(result >= 0);
		elsewhere += result != VECTOR;
	}
	EXPECT(elsewhere);
	return 0;
}

static int vectors(struct pair *pair)
{
	int result;

	if (set_cpus_allowed_ptr(current, cpumask_of(!VECTOR)))
		return -EIO;
	result = vectors_under_load(pair);
	set_cpus_allowed_ptr(current, cpu_possible_mask);
	return result;
}

/* A Send arrives before its receive is posted, and waits for it. */
static int late_receive(struct pair *pair)
{
	fill(pair->a.buffer, 1000, 4);
	EXPECT(!post_send(&pair->a, 1, 0, 1000, 0));
	EXPECT(!expect(&pair->a, 1, IB_WC_SEND));
	msleep(50);
	EXPECT(!post_receive(&pair->b, 2, 0, 1000));
	EXPECT(!expect(&pair->b, 2, IB_WC_RECV));
	return memcmp(pair->a.buffer, pair->b.buffer, 1000) ? -EIO : 0;
}

/* A disconnect flushes outstanding receives in order. Later requests are flushed, too. */
static int flush_after_disconnect(struct pair *pair)
{
	struct endpoint *b = &pair->b;
	struct ib_wc wc;
	u32 i;

	for (i = 0; i < 8; i++)
		EXPECT(!post_receive(b, i, 0, 64));
	EXPECT(!rdma_disconnect(pair->a.id));
	EXPECT(!await(b, RDMA_CM_EVENT_DISCONNECTED));
	for (i = 0; i < 8; i++) {
		EXPECT(!next_completion(b, &wc));
		EXPECT(wc.status == IB_WC_WR_FLUSH_ERR && wc.wr_id == i);
	}
	EXPECT(!post_receive(b, 100, 0, 64));
	EXPECT(!post_send(b, 101, 0, 64, 0));
	for (i = 0; i < 2; i++) {
		EXPECT(!next_completion(b, &wc));
		EXPECT(wc.status == IB_WC_WR_FLUSH_ERR && (wc.wr_id == 100 || wc.wr_id == 101));
	}
	return 0;
}

/* Destroying a queue pair removes its entries from the completion queue. */
static int destroyed_qp_entries(struct pair *pair)
{
	struct ib_wc wc;
	u32 i;

	for (i = 0; i < 4; i++)
		EXPECT(!post_receive(&pair->b, i, 0, 64));
	for (i = 0; i < 4; i++) {
		EXPECT(!post_send(&pair->a, i, 0, 64, 0));
		EXPECT(!expect(&pair->a, i, IB_WC_SEND));
	}
	EXPECT(!expect(&pair->b, 0, IB_WC_RECV));
	rdma_disconnect(pair->b.id);
	rdma_destroy_qp(pair->b.id);
	EXPECT(!ib_poll_cq(pair->b.cq, 1, &wc));
	return 0;
}

const struct test tests[] = {
	{ "sends", sends },
	{ "sends to shared receives", sends, .srq = true },
	{ "inline", inline_send },
	{ "event requests", event_requests },
	{ "registration", registration },
	{ "immediate data", immediate },
	{ "local invalidation", local_invalidation },
	{ "read with invalidate", read_with_invalidate },
	{ "post with interrupts off", post_with_interrupts_off },
	{ "post in softirq", post_in_softirq },
	{ "post in interrupts", post_in_interrupts },
	{ "completion vectors", vectors },
	{ "late receive", late_receive },
	{ "late shared receive", late_receive, .srq = true },
	{ "flush after disconnect", flush_after_disconnect },
	{ "destroyed queue pair's completions", destroyed_qp_entries },
};

const int test_count = ARRAY_SIZE(tests);
