// SPDX-License-Identifier: MIT OR Apache-2.0
/* Calls with a limited amount of work, and timers. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/limits.h>
#include <linux/minmax.h>
#include <linux/string.h>

#include "test.h"

/* The end of a stream flushes more requests than one call completes. */
int flush_in_steps(struct pair *pair)
{
	struct end *b = &pair->b;
	const u64 most = 16, count = 100;
	u64 before;
	int i;

	for (i = 0; i < count; i++)
		EXPECT(!post_receive(b, i));
	rk_qp_stream_gone(b->qp);
	EXPECT(b->receives == most);
	do {
		before = b->receives;
		EXPECT(b->last_receive.wr_id == before - 1);
		EXPECT(rk_complete_due(b->qp) == (before + most < count));
		EXPECT(b->receives == min(before + most, count));
	} while (b->receives < count);
	EXPECT(b->failures == count && !rk_complete_due(b->qp));
	EXPECT(b->receives == count);
	return 0;
}

/* A Send without a receive ends the stream when its time limit expires, and not before. */
int held_too_long(struct pair *pair)
{
	const u64 held = START + NSEC_PER_SEC, limit = 300 * NSEC_PER_MSEC;
	struct end *a = &pair->a, *b = &pair->b;
	u64 now = held;
	int i;

	EXPECT(rk_poll_at(b->qp) == RK_NEVER);
	EXPECT(!post(a, RK_SEND, 1, b));
	EXPECT(carry(a, b, 1448) == RK_RX_HELD);
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

/* The initiator's first FPDU does not arrive in time. */
int never_spoken_to(struct pair *pair)
{
	const u64 end = START + 50 * NSEC_PER_MSEC;
	struct end *b = &pair->b;

	EXPECT(!post_receive(b, 1));
	EXPECT(rk_poll_at(b->qp) == end);
	rk_on_time(b->qp, end - 1);
	EXPECT(rk_qp_wish(b->qp) == RK_WISH_KEEP && !b->receives);
	rk_on_time(b->qp, end);
	EXPECT(rk_qp_wish(b->qp) == RK_WISH_ABORT);
	EXPECT(b->receives == 1 && b->last_receive.status);
	return 0;
}

/*
 * A stream breaks in the middle of a plan. What remains in the area must not be sent on the next
 * stream.
 */
int used_again(struct pair *pair)
{
	const struct rk_stream stream = { .initiator = 1, .ird = 16, .ord = 16, .emss = 1460 };
	struct end *a = &pair->a;
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
	/* Without an area nothing is sent, and nothing is lost. */
	EXPECT(!post(a, RK_WRITE, 2, &pair->b));
	EXPECT(rk_tx_fill(a->qp, a->device) == RK_FILL_IDLE && rk_wants_tx(a->qp));
	rk_area_lend(a->qp, a->area);
	EXPECT(rk_tx_fill(a->qp, a->device) == RK_FILL_READY);
	return 0;
}
