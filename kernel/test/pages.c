// SPDX-License-Identifier: MIT OR Apache-2.0
/* Memory as in a kernel: scattered single pages. The region begins and ends inside of a page. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/random.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "test.h"

#define PAGES 17
/* The region does not cover the beginning of the first page and the end of the last one. */
#define FIRST 1000
#define LENGTH (PAGES * PAGE_SIZE - FIRST - 1096)
#define IOVA (0x7f0000000000 + FIRST)

struct scattered {
	struct page *pages[PAGES];
	u64 list[PAGES];
	/* For fast registrations: what ib_map_mr_sg() would put into the region. */
	u64 mapped[PAGES];
	u32 stag;
};

static u8 *octet(const struct scattered *s, size_t at)
{
	return (u8 *)(unsigned long)s->list[at / PAGE_SIZE] + at % PAGE_SIZE;
}

/*
 * Allocates pages that are not adjacent: every second page of a run, from its end to its beginning.
 */
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
	memcpy(s->mapped, s->list, sizeof(s->mapped));
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

/*
 * Returns how many bytes of the two regions differ, plus the bytes around the region of `to` that
 * are not zero.
 */
static size_t wrong(const struct scattered *from, const struct scattered *to)
{
	size_t at, bad = 0;

	for (at = 0; at < PAGES * PAGE_SIZE; at++) {
		bool inside = at >= FIRST && at < FIRST + LENGTH;

		bad += *octet(to, at) != (inside ? *octet(from, at) : 0);
	}
	return bad;
}

static struct rk_send all_of(const struct scattered *s, u32 stag)
{
	return (struct rk_send){
		.remote_addr = IOVA,
		.len = LENGTH,
		.rkey = stag,
		.first = FIRST,
		.num_pages = PAGES,
	};
}

static int transfers(struct pair *pair, struct scattered *from, struct scattered *to)
{
	struct end *a = &pair->a, *b = &pair->b;
	struct rk_sge all = { .addr = IOVA, .len = LENGTH, .lkey = from->stag };
	struct rk_send reg = all_of(to, to->stag | 0x55);
	int i;

	EXPECT(!register_fast(b, &reg));
	fill(from, 1);
	EXPECT(!post_part(a, RK_WRITE, 71, all, IOVA, reg.rkey));
	EXPECT(!carry(a, b, 1448));
	EXPECT(!wrong(from, to));

	/* A Read brings it back, to where zeros are now. */
	for (i = 0; i < PAGES; i++)
		memset(octet(from, i * PAGE_SIZE), 0, PAGE_SIZE);
	EXPECT(!post_part(a, RK_READ, 72, all, IOVA, reg.rkey));
	EXPECT(!carry(a, b, 1448));
	EXPECT(!carry(b, a, 997));
	EXPECT(a->sends == 2 && !a->failures);
	EXPECT(!wrong(to, from));

	/* One byte beyond the end. */
	fill(from, 9);
	EXPECT(!post_part(a, RK_WRITE, 73, all, IOVA + 1, reg.rkey));
	EXPECT(carry(a, b, 1 << 20) == -EPROTO);
	return 0;
}

/*
 * A region for fast registrations gets all pages, then two of them, then more than it was created
 * for.
 */
static int in_turn(struct pair *pair, struct scattered *from, struct scattered *to)
{
	struct end *a = &pair->a, *b = &pair->b;
	struct rk_sge part = { .addr = IOVA, .len = LENGTH, .lkey = from->stag };
	struct rk_send reg = all_of(to, to->stag | 1);
	const size_t begin = 3 * PAGE_SIZE, len = 2 * PAGE_SIZE;
	size_t at;

	EXPECT(!register_fast(b, &reg));
	fill(from, 1);
	EXPECT(!post_part(a, RK_WRITE, 80, part, IOVA, reg.rkey));
	EXPECT(!carry(a, b, 1448));
	EXPECT(!wrong(from, to));
	EXPECT(!invalidate(b, reg.rkey));

	reg = (struct rk_send){
		.remote_addr = 0x1234567,
		.len = len,
		.rkey = to->stag | 2,
		.num_pages = 2,
	};
	memcpy(to->mapped, to->list + 3, 2 * sizeof(*to->mapped));
	EXPECT(!register_fast(b, &reg));
	part.len = len;
	EXPECT(!post_part(a, RK_WRITE, 81, part, reg.remote_addr, reg.rkey));
	EXPECT(!carry(a, b, 1448));
	for (at = FIRST; at < FIRST + LENGTH; at++) {
		bool again = at >= begin && at < begin + len;

		EXPECT(*octet(to, at) == *octet(from, again ? at - begin + FIRST : at));
	}
	EXPECT(a->sends == 2 && !a->failures && !b->failures);
	EXPECT(!invalidate(b, reg.rkey));

	reg = all_of(to, to->stag | 3);
	reg.num_pages++;
	EXPECT(register_fast(b, &reg) == -EACCES);
	return 0;
}

/* Runs a test with a region of `a` and a region for fast registrations of `b`. */
static int with_pages(struct pair *pair,
		      int (*run)(struct pair *, struct scattered *, struct scattered *))
{
	struct scattered *from = kzalloc(sizeof(*from), GFP_KERNEL);
	struct scattered *to = kzalloc(sizeof(*to), GFP_KERNEL);
	int error = -ENOMEM;

	if (from && to && !scatter(from) && !scatter(to)) {
		from->stag = rk_register_pages(pair->a.device, from->list, FIRST, LENGTH, IOVA, PD,
					       ALL_RIGHTS, get_random_u32());
		to->stag = rk_allocate_fast(pair->b.device, to->mapped, PAGES, PD,
					    get_random_u32() & ~0xff);
		error = from->stag && to->stag ? run(pair, from, to) : -EINVAL;
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

/* From a region to a fast registration, both in scattered pages. */
int scattered_pages(struct pair *pair)
{
	return with_pages(pair, transfers);
}

/* Each fast registration has its own pages. */
int page_lists(struct pair *pair)
{
	return with_pages(pair, in_turn);
}
