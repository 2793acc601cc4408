// SPDX-License-Identifier: MIT OR Apache-2.0
/* Memory as a kernel has it: single pages in no order, of which the region begins and ends inside. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/random.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "test.h"

#define PAGES 17
/* The region: it leaves octets alone in the first page and in the last one. */
#define FIRST 1000
#define LENGTH (PAGES * PAGE_SIZE - FIRST - 1096)
#define IOVA (0x7f0000000000 + FIRST)

struct scattered {
	struct page *pages[PAGES];
	u64 list[PAGES];
	u32 stag;
};

static u8 *octet(const struct scattered *s, size_t at)
{
	return (u8 *)(unsigned long)s->list[at / PAGE_SIZE] + at % PAGE_SIZE;
}

/* Pages that do not follow each other: each second one of a run is taken, from the end of the run to its beginning. */
static int scatter(struct scattered *s)
{
	struct page *others[PAGES] = {};
	int i, error = 0;

	for (i = 0; i < PAGES; i++) {
		s->pages[i] = alloc_page(GFP_KERNEL | __GFP_ZERO);
		others[i] = alloc_page(GFP_KERNEL);
		if (!s->pages[i] || !others[i])
			error = -ENOMEM;
	}
	for (i = 0; i < PAGES; i++)
		if (others[i])
			__free_page(others[i]);
	for (i = 0; i < PAGES && !error; i++)
		s->list[i] = (unsigned long)page_address(s->pages[(i * 7 + 3) % PAGES]);
	return error;
}

static void gather(struct scattered *s)
{
	int i;

	for (i = 0; i < PAGES; i++)
		if (s->pages[i])
			__free_page(s->pages[i]);
}

static void fill(const struct scattered *s, u32 seed)
{
	int i;

	for (i = 0; i < PAGES; i++)
		pattern(octet(s, i * PAGE_SIZE), PAGE_SIZE, seed + i);
}

/* Octets of the two regions that differ, and octets of `to` around its region that are not zero. */
static size_t wrong(const struct scattered *from, const struct scattered *to)
{
	size_t at, bad = 0;

	for (at = 0; at < PAGES * PAGE_SIZE; at++) {
		bool inside = at >= FIRST && at < FIRST + LENGTH;

		bad += *octet(to, at) != (inside ? *octet(from, at) : 0);
	}
	return bad;
}

static int transfers(struct pair *pair, struct scattered *from, struct scattered *to)
{
	struct end *a = &pair->a, *b = &pair->b;
	struct rk_sge sge = { .addr = IOVA, .len = LENGTH, .lkey = from->stag };
	struct rk_send reg = {
		.wr_id = 70,
		.op = RK_FAST_REG,
		.flags = RK_SIGNALED,
		.remote_addr = IOVA,
		.len = LENGTH,
		.rkey = (to->stag & ~0xff) | 0x55,
		.access = ALL_RIGHTS,
	};
	struct rk_send send = {
		.wr_id = 71,
		.op = RK_WRITE,
		.flags = RK_SIGNALED,
		.remote_addr = IOVA,
		.rkey = reg.rkey,
		.sges = &sge,
		.num_sge = 1,
	};
	int i;

	/* The responder sends nothing before the initiator's first FPDU. */
	EXPECT(!post(a, RK_WRITE, 69, b));
	EXPECT(!carry(a, b, 1448));
	EXPECT(!rk_post_send(b->qp, &reg));
	EXPECT(!carry(b, a, 1448));
	EXPECT(b->sends == 1 && !b->failures);
	to->stag = reg.rkey;

	fill(from, 1);
	EXPECT(!rk_post_send(a->qp, &send));
	EXPECT(!carry(a, b, 1448));
	EXPECT(!wrong(from, to));

	/* Back by a Read, to where zeros are now. */
	for (i = 0; i < PAGES; i++)
		memset(octet(from, i * PAGE_SIZE), 0, PAGE_SIZE);
	send.op = RK_READ;
	EXPECT(!rk_post_send(a->qp, &send));
	EXPECT(!carry(a, b, 1448));
	EXPECT(!carry(b, a, 997));
	EXPECT(a->sends == 3 && !a->failures);
	EXPECT(!wrong(to, from));

	/* One octet too far. */
	send.op = RK_WRITE;
	send.remote_addr++;
	fill(from, 9);
	EXPECT(!rk_post_send(a->qp, &send));
	EXPECT(carry(a, b, 1 << 20) == -EPROTO);
	return 0;
}

/* Between a region and one of a fast registration, both in scattered pages. */
int scattered_pages(struct pair *pair)
{
	struct scattered *from = kzalloc(sizeof(*from), GFP_KERNEL);
	struct scattered *to = kzalloc(sizeof(*to), GFP_KERNEL);
	int error = -ENOMEM;

	if (from && to && !scatter(from) && !scatter(to)) {
		from->stag = rk_register_pages(pair->a.device, from->list, FIRST, LENGTH, IOVA, PD,
					       ALL_RIGHTS, get_random_u32());
		to->stag = rk_allocate_fast(pair->b.device, to->list, FIRST, LENGTH, PD,
					    get_random_u32());
		error = from->stag && to->stag ? transfers(pair, from, to) : -EINVAL;
		if (from->stag && rk_deregister(pair->a.device, from->stag))
			error = -EBUSY;
		if (to->stag && rk_deregister(pair->b.device, to->stag))
			error = -EBUSY;
	}
	if (from)
		gather(from);
	if (to)
		gather(to);
	kfree(from);
	kfree(to);
	return error;
}
