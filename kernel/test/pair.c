// SPDX-License-Identifier: MIT OR Apache-2.0
/* Makes the two ends of a test, posts requests and takes completions. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/gfp.h>
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

static int end_make(struct end *end, const char *name, u32 qp_num)
{
	struct rk_qp_config config = {
		.qp_num = qp_num,
		.pd = PD,
		.max_send_wr = 128,
		.max_recv_wr = 128,
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
	end->qp = rk_qp_new(&config, end);
	return end->stag && end->qp ? 0 : -ENOMEM;
}

static void end_free(struct end *end)
{
	rk_qp_free(end->qp);
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
	};
	int error;

	error = end_make(&pair->a, "a", 1);
	if (!error)
		error = end_make(&pair->b, "b", 2);
	if (!error && test->tcp)
		error = over_tcp_open(pair);
	if (!error)
		error = rk_qp_start(pair->a.qp, &stream);
	stream.initiator = 0;
	if (!error)
		error = rk_qp_start(pair->b.qp, &stream);
	return error;
}

/* Also after pair_make() has failed half-way. */
void pair_free(struct pair *pair)
{
	over_tcp_close(pair);
	end_free(&pair->a);
	end_free(&pair->b);
}

/* Octets that differ from place to place and from seed to seed. */
void pattern(u8 *at, size_t len, u32 seed)
{
	size_t i;

	for (i = 0; i < len; i++)
		at[i] = ((u32)i * 2654435761u + seed * 40503u) >> 13;
}

/* A signaled request with the whole buffer. For a Write and a Read the peer's buffer is the other place. */
int post(struct end *end, u32 op, u64 wr_id, const struct end *peer)
{
	struct rk_sge sge = {
		.addr = (unsigned long)end->buffer,
		.len = BUFFER,
		.lkey = end->stag,
	};
	struct rk_send send = {
		.wr_id = wr_id,
		.remote_addr = (unsigned long)peer->buffer,
		.rkey = peer->stag,
		.sges = &sge,
		.num_sge = 1,
		.op = op,
		.flags = RK_SIGNALED,
	};
	int error;

	spin_lock_bh(&end->lock);
	error = rk_post_send(end->qp, &send);
	spin_unlock_bh(&end->lock);
	return error;
}

/* A receive into the whole buffer. */
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
