// SPDX-License-Identifier: MIT OR Apache-2.0
/* Tests of the limit of completions per call, of timers, and of the restart of a stream. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/limits.h>
#include <linux/minmax.h>
#include <linux/string.h>

#include "test.h"

/* When a stream ends, more requests are flushed than one call completes. */
int flush_in_steps(struct pair *pair)
{
	struct endpoint *b = &pair->b;
	const u64 per_call = 16, count = 100;
	u64 before;
	int i;

	for (i = 0; i < count; i++)
		EXPECT(!post_receive(b, i));
	rk_qp_stream_gone(b->qp);
	EXPECT(b->receives == per_call);
	do {
		before = b->receives;
		EXPECT(b->last_receive.wr_id == before - 1);
		EXPECT(rk_complete_due(b->qp) == (before + per_call < count));
		EXPECT(b->receives == min(before + per_call, count));
	} while (b->receives < count);
	EXPECT(b->failures == count && !rk_complete_due(b->qp));
	EXPECT(b->receives == count);
	return 0;
}

/* A Send that finds no receive ends the stream when its time limit expires, not before. */
int hold_time_limit(struct pair *pair)
{
	const u64 held = START + NSEC_PER_SEC, limit = 300 * NSEC_PER_MSEC;
	struct endpoint *a = &pair->a, *b = &pair->b;
	u64 now = held;
	int i;

	EXPECT(rk_poll_at(b->qp) == RK_NEVER);
	EXPECT(!post(a, RK_SEND, 1, b));
	EXPECT(transfer(a, b, 1448) == RK_RX_HELD);
	EXPECT(rk_poll_at(b->qp) <= now);
	rk_on_time(b->qp, now);
	for (i = 0; rk_qp_state(b->qp) == RK_STATE_RTS && i < 10; i++) {
		EXPECT(rk_poll_at(b->qp) > now && rk_poll_at(b->qp) != RK_NEVER);
		now = rk_poll_at(b->qp);
		rk_on_time(b->qp, now - 1);
		EXPECT(rk_qp_state(b->qp) == RK_STATE_RTS);
		rk_on_time(b->qp, now);
	}
	EXPECT(rk_qp_state(b->qp) == RK_STATE_ERROR);
	EXPECT(now >= held + limit && now <= held + 2 * limit);
	EXPECT(rk_poll_at(b->qp) == RK_NEVER);
	return 0;
}

/* A responder resets the stream if the initiator's first FPDU does not arrive in time. */
int no_first_fpdu(struct pair *pair)
{
	const u64 deadline = START + 50 * NSEC_PER_MSEC;
	struct endpoint *b = &pair->b;

	EXPECT(!post_receive(b, 1));
	EXPECT(rk_poll_at(b->qp) == deadline);
	rk_on_time(b->qp, deadline - 1);
	EXPECT(rk_qp_wish(b->qp) == RK_WISH_KEEP && !b->receives);
	rk_on_time(b->qp, deadline);
	EXPECT(rk_qp_wish(b->qp) == RK_WISH_ABORT);
	EXPECT(b->receives == 1 && b->last_receive.status);
	return 0;
}

/*
 * A stream fails while part of a plan is unsent. The area must not keep that part for the next
 * stream.
 */
int stream_restart(struct pair *pair)
{
	const struct rk_stream stream = { .initiator = 1, .ird = 16, .ord = 16, .emss = 1460 };
	struct endpoint *a = &pair->a;
	const struct kvec *runs;

	EXPECT(!post(a, RK_WRITE, 1, &pair->b));
	EXPECT(rk_tx_fill(a->qp, a->device) == RK_FILL_READY);
	EXPECT(rk_tx_runs(a->qp, a->device, &runs) > 0);
	rk_tx_written(a->qp, a->device, 100);
	EXPECT(!rk_area_take_back(a->qp) && rk_area_is_lent(a->qp));
	rk_stream_failed(a->qp);
	rk_qp_stream_gone(a->qp);
	EXPECT(a->sends == 1 && a->failures == 1);
	EXPECT(!rk_qp_modify(a->qp, RK_STATE_RESET));
	EXPECT(!rk_qp_start(a->qp, &stream, START));
	EXPECT(!rk_wants_tx(a->qp) && rk_tx_fill(a->qp, a->device) == RK_FILL_IDLE);
	EXPECT(rk_area_take_back(a->qp) == a->area && !rk_area_is_lent(a->qp));
	/* Without an area, the request is not sent, but it is not lost either. */
	EXPECT(!post(a, RK_WRITE, 2, &pair->b));
	EXPECT(rk_tx_fill(a->qp, a->device) == RK_FILL_IDLE && rk_wants_tx(a->qp));
	rk_area_lend(a->qp, a->area);
	EXPECT(rk_tx_fill(a->qp, a->device) == RK_FILL_READY);
	return 0;
}
