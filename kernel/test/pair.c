// SPDX-License-Identifier: MIT OR Apache-2.0
/* Creates the two ends of a test, posts requests and takes completions. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/errno.h>
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/preempt.h>
#include <linux/random.h>

#include "test.h"

/* Called by the engine, with the end's lock held. */
void iwarp_complete(void *owner, int receive, const struct rk_completion *completion)
{
	struct end *end = owner;

	if (completion->status)
		end->failures++;
	if (in_serving_softirq())
		end->in_softirq++;
	if (receive) {
		end->receives++;
		end->last_receive = *completion;
	} else {
		end->sends++;
		end->last_send = *completion;
	}
}

/* Receives are posted to the queue pairs themselves. */
bool iwarp_take_receive(void *owner, struct rk_receive *receive)
{
	return false;
}

static int end_make(struct end *end, const char *name, u32 qp_num, const struct test *test)
{
	struct rk_qp_config config = {
		.qp_num = qp_num,
		.pd = PD,
		.max_send_wr = 128,
		.max_recv_wr = 128,
		.most_completions = test->most_completions,
		.hold_ms = test->hold_ms,
		.max_sge = 4,
		.max_ird = 16,
		.max_ord = 16,
	};

	end->name = name;
	spin_lock_init(&end->lock);
	init_waitqueue_head(&end->completed);
	init_waitqueue_head(&end->work);
	end->buffer = alloc_pages_exact(BUFFER, GFP_KERNEL | __GFP_ZERO);
	end->device = rk_device_new();
	if (!end->buffer || !end->device)
		return -ENOMEM;
	end->stag = rk_register(end->device, (unsigned long)end->buffer, BUFFER, PD, ALL_RIGHTS,
				get_random_u32());
	end->area = rk_area_new();
	end->qp = rk_qp_new(&config, end);
	if (!end->stag || !end->area || !end->qp)
		return -ENOMEM;
	rk_area_lend(end->qp, end->area);
	return 0;
}

static void end_free(struct end *end)
{
	rk_qp_free(end->qp);
	rk_area_free(end->area);
	if (end->stag)
		WARN_ON(rk_deregister(end->device, end->stag));
	rk_device_free(end->device);
	if (end->buffer)
		free_pages_exact(end->buffer, BUFFER);
}

int pair_make(struct pair *pair, const struct test *test)
{
	struct rk_stream stream = {
		.initiator = 1,
		.crc = test->crc,
		.markers = test->markers,
		.ird = 16,
		.ord = 16,
		.emss = test->tcp ? 65483 : 1460,
		.first_fpdu_ms = test->first_fpdu_ms,
	};
	int error;

	error = end_make(&pair->a, "a", 1, test);
	if (!error)
		error = end_make(&pair->b, "b", 2, test);
	if (!error && test->tcp)
		error = over_tcp_open(pair);
	if (!error)
		error = rk_qp_start(pair->a.qp, &stream, START);
	stream.initiator = 0;
	if (!error)
		error = rk_qp_start(pair->b.qp, &stream, START);
	return error;
}

/* Also called after pair_make() has failed half-way. */
void pair_free(struct pair *pair)
{
	over_tcp_close(pair);
	end_free(&pair->a);
	end_free(&pair->b);
}

/* Fills memory with bytes that depend on place and seed. */
void pattern(u8 *at, size_t len, u32 seed)
{
	size_t i;

	for (i = 0; i < len; i++)
		at[i] = ((u32)i * 2654435761u + seed * 40503u) >> 13;
}

static int post_request(struct end *end, const struct rk_send *send)
{
	int error;

	spin_lock_bh(&end->lock);
	error = rk_post_send(end->qp, send);
	spin_unlock_bh(&end->lock);
	return error;
}

int post_part(struct end *end, u32 op, u64 wr_id, struct rk_sge part, u64 remote_addr, u32 rkey)
{
	struct rk_send send = {
		.wr_id = wr_id,
		.remote_addr = remote_addr,
		.rkey = rkey,
		.sges = &part,
		.num_sge = 1,
		.op = op,
		.flags = RK_SIGNALED,
	};

	return post_request(end, &send);
}

/* Posts a signaled request with the whole buffer. Writes and Reads use the peer's whole buffer. */
int post(struct end *end, u32 op, u64 wr_id, const struct end *peer)
{
	struct rk_sge whole = {
		.addr = (unsigned long)end->buffer,
		.len = BUFFER,
		.lkey = end->stag,
	};

	return post_part(end, op, wr_id, whole, (unsigned long)peer->buffer, peer->stag);
}

/* Executes a request that sends nothing, even as a responder before the first FPDU. */
static int carry_out(struct end *end, struct rk_send *send)
{
	u64 sends = end->sends;
	int fill;

	send->wr_id = 1000 + sends;
	send->flags = RK_SIGNALED;
	EXPECT(!post_request(end, send));
	fill = rk_tx_fill(end->qp, end->device);
	EXPECT(end->sends == sends + 1 && end->last_send.wr_id == send->wr_id);
	/* If the stream has ended, a Terminate is pending. */
	if (end->last_send.status)
		return -EACCES;
	EXPECT(fill == RK_FILL_IDLE);
	return 0;
}

/* Registers pages with all rights. Returns -EACCES if that is refused. */
int register_fast(struct end *end, struct rk_send *pages)
{
	pages->op = RK_FAST_REG;
	pages->access = ALL_RIGHTS;
	pages->page_shift = PAGE_SHIFT;
	return carry_out(end, pages);
}

int invalidate(struct end *end, u32 stag)
{
	struct rk_send send = { .op = RK_LOCAL_INV, .rkey = stag };

	return carry_out(end, &send);
}

int post_receive(struct end *end, u64 wr_id)
{
	struct rk_sge sge = {
		.addr = (unsigned long)end->buffer,
		.len = BUFFER,
		.lkey = end->stag,
	};
	int error;

	spin_lock_bh(&end->lock);
	error = rk_post_recv(end->qp, wr_id, &sge, 1);
	spin_unlock_bh(&end->lock);
	return error;
}
