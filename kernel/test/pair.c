// SPDX-License-Identifier: MIT OR Apache-2.0
/* Creates the two endpoints of a test, posts requests, and stores completions. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/errno.h>
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/preempt.h>
#include <linux/random.h>

#include "test.h"

/* Called by the engine with the endpoint's lock. */
void iwarp_complete(void *owner, int receive, const struct rk_completion *completion)
{
	struct endpoint *ep = owner;

	if (completion->status)
		ep->failures++;
	if (in_serving_softirq())
		ep->in_softirq++;
	if (receive) {
		ep->receives++;
		ep->last_receive = *completion;
	} else {
		ep->sends++;
		ep->last_send = *completion;
	}
}

/* Not used: the tests post receives to the engine. */
bool iwarp_take_receive(void *owner, struct rk_receive *receive)
{
	return false;
}

static int endpoint_create(struct endpoint *ep, const char *name, u32 qp_num,
			   const struct test *test)
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

	ep->name = name;
	spin_lock_init(&ep->lock);
	init_waitqueue_head(&ep->completed);
	init_waitqueue_head(&ep->work);
	ep->buffer = alloc_pages_exact(BUFFER, GFP_KERNEL | __GFP_ZERO);
	ep->device = rk_device_new();
	if (!ep->buffer || !ep->device)
		return -ENOMEM;
	ep->stag = rk_register(ep->device, (unsigned long)ep->buffer, BUFFER, PD, ALL_RIGHTS,
			       get_random_u32());
	ep->area = rk_area_new();
	ep->qp = rk_qp_new(&config, ep);
	if (!ep->stag || !ep->area || !ep->qp)
		return -ENOMEM;
	rk_area_lend(ep->qp, ep->area);
	return 0;
}

static void endpoint_free(struct endpoint *ep)
{
	rk_qp_free(ep->qp);
	rk_area_free(ep->area);
	if (ep->stag)
		WARN_ON(rk_deregister(ep->device, ep->stag));
	rk_device_free(ep->device);
	if (ep->buffer)
		free_pages_exact(ep->buffer, BUFFER);
}

int pair_create(struct pair *pair, const struct test *test)
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

	error = endpoint_create(&pair->a, "a", 1, test);
	if (!error)
		error = endpoint_create(&pair->b, "b", 2, test);
	if (!error && test->tcp)
		error = over_tcp_open(pair);
	if (!error)
		error = rk_qp_start(pair->a.qp, &stream, START);
	stream.initiator = 0;
	if (!error)
		error = rk_qp_start(pair->b.qp, &stream, START);
	return error;
}

/* May also be called after pair_create() has failed. */
void pair_free(struct pair *pair)
{
	over_tcp_close(pair);
	endpoint_free(&pair->a);
	endpoint_free(&pair->b);
}

/* Fills memory with bytes that depend on their offset and on `seed`. */
void pattern(u8 *at, size_t len, u32 seed)
{
	size_t i;

	for (i = 0; i < len; i++)
		at[i] = ((u32)i * 2654435761u + seed * 40503u) >> 13;
}

static int post_request(struct endpoint *ep, const struct rk_send *send)
{
	int error;

	spin_lock_bh(&ep->lock);
	error = rk_post_send(ep->qp, send);
	spin_unlock_bh(&ep->lock);
	return error;
}

int post_range(struct endpoint *ep, u32 op, u64 wr_id, struct rk_sge sge, u64 remote_addr,
	       u32 rkey)
{
	struct rk_send send = {
		.wr_id = wr_id,
		.remote_addr = remote_addr,
		.rkey = rkey,
		.sges = &sge,
		.num_sge = 1,
		.op = op,
		.flags = RK_SIGNALED,
	};

	return post_request(ep, &send);
}

/* Posts a signaled request for the whole buffer; a Write or Read also uses the peer's buffer. */
int post(struct endpoint *ep, u32 op, u64 wr_id, const struct endpoint *peer)
{
	struct rk_sge whole = {
		.addr = (unsigned long)ep->buffer,
		.len = BUFFER,
		.lkey = ep->stag,
	};

	return post_range(ep, op, wr_id, whole, (unsigned long)peer->buffer, peer->stag);
}

/*
 * Posts a local request, and checks that it completes immediately. That works even for a responder
 * before the first FPDU.
 */
static int execute(struct endpoint *ep, struct rk_send *send)
{
	u64 sends = ep->sends;
	int fill;

	send->wr_id = 1000 + sends;
	send->flags = RK_SIGNALED;
	EXPECT(!post_request(ep, send));
	fill = rk_tx_fill(ep->qp, ep->device);
	EXPECT(ep->sends == sends + 1 && ep->last_send.wr_id == send->wr_id);
	/* If the stream has ended, a Terminate is pending. */
	if (ep->last_send.status)
		return -EACCES;
	EXPECT(fill == RK_FILL_IDLE);
	return 0;
}

/* Registers pages with all rights. Returns -EACCES if the engine refuses the registration. */
int register_fast(struct endpoint *ep, struct rk_send *pages)
{
	pages->op = RK_FAST_REG;
	pages->access = ALL_RIGHTS;
	pages->page_shift = PAGE_SHIFT;
	return execute(ep, pages);
}

int invalidate(struct endpoint *ep, u32 stag)
{
	struct rk_send send = { .op = RK_LOCAL_INV, .rkey = stag };

	return execute(ep, &send);
}

int post_receive(struct endpoint *ep, u64 wr_id)
{
	struct rk_sge sge = {
		.addr = (unsigned long)ep->buffer,
		.len = BUFFER,
		.lkey = ep->stag,
	};
	int error;

	spin_lock_bh(&ep->lock);
	error = rk_post_recv(ep->qp, wr_id, &sge, 1);
	spin_unlock_bh(&ep->lock);
	return error;
}
