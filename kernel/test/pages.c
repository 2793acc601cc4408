// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Tests of regions of single pages that are not contiguous. The region begins and ends in the
 * middle of a page.
 */
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
	/* For fast registrations: the list that ib_map_mr_sg() would fill. */
	u64 mapped[PAGES];
	u32 stag;
};

static u8 *byte_at(const struct scattered *s, size_t at)
{
	return (u8 *)(unsigned long)s->list[at / PAGE_SIZE] + at % PAGE_SIZE;
}

/*
 * Allocates pages that are usually not adjacent, by freeing every second page, and lists them in a
 * mixed order.
 */
static int alloc_scattered(struct scattered *s)
{
	struct page *gaps[PAGES] = {};
	int i, error = 0;

	for (i = 0; i < PAGES; i++) {
		s->pages[i] = alloc_page(GFP_KERNEL | __GFP_ZERO);
		gaps[i] = alloc_page(GFP_KERNEL);
		if (!s->pages[i] || !gaps[i])
			error = -ENOMEM;
	}
	for (i = 0; i < PAGES; i++)
		if (gaps[i])
			__free_page(gaps[i]);
	for (i = 0; i < PAGES && !error; i++)
		s->list[i] = (unsigned long)page_address(s->pages[(i * 7 + 3) % PAGES]);
	memcpy(s->mapped, s->list, sizeof(s->mapped));
	return error;
}

static void free_pages_of(struct scattered *s)
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
		pattern(byte_at(s, i * PAGE_SIZE), PAGE_SIZE, seed + i);
}

/*
 * Returns the number of bytes that differ between the two regions, plus the number of bytes outside
 * of the region of `to` that are not zero.
 */
static size_t count_differences(const struct scattered *from, const struct scattered *to)
{
	size_t at, bad = 0;

	for (at = 0; at < PAGES * PAGE_SIZE; at++) {
		bool inside = at >= FIRST && at < FIRST + LENGTH;

		bad += *byte_at(to, at) != (inside ? *byte_at(from, at) : 0);
	}
	return bad;
}

static struct rk_send whole_region(const struct scattered *s, u32 stag)
{
	return (struct rk_send){
		.remote_addr = IOVA,
		.len = LENGTH,
		.rkey = stag,
		.first = FIRST,
		.num_pages = PAGES,
	};
}

static int write_and_read(struct pair *pair, struct scattered *from, struct scattered *to)
{
	struct endpoint *a = &pair->a, *b = &pair->b;
	struct rk_sge all = { .addr = IOVA, .len = LENGTH, .lkey = from->stag };
	struct rk_send reg = whole_region(to, to->stag | 0x55);
	int i;

	EXPECT(!register_fast(b, &reg));
	fill(from, 1);
	EXPECT(!post_range(a, RK_WRITE, 71, all, IOVA, reg.rkey));
	EXPECT(!transfer(a, b, 1448));
	EXPECT(!count_differences(from, to));

	/* Clear the source. A Read fetches the data back into it. */
	for (i = 0; i < PAGES; i++)
		memset(byte_at(from, i * PAGE_SIZE), 0, PAGE_SIZE);
	EXPECT(!post_range(a, RK_READ, 72, all, IOVA, reg.rkey));
	EXPECT(!transfer(a, b, 1448));
	EXPECT(!transfer(b, a, 997));
	EXPECT(a->sends == 2 && !a->failures);
	EXPECT(!count_differences(to, from));

	/* A Write that ends one byte beyond the region is refused. */
	fill(from, 9);
	EXPECT(!post_range(a, RK_WRITE, 73, all, IOVA + 1, reg.rkey));
	EXPECT(transfer(a, b, 1 << 20) == -EPROTO);
	return 0;
}

/*
 * Registers all pages, then two of them, with the same region. Registering more pages than the
 * region was created for is refused.
 */
static int changing_page_lists(struct pair *pair, struct scattered *from, struct scattered *to)
{
	struct endpoint *a = &pair->a, *b = &pair->b;
	struct rk_sge part = { .addr = IOVA, .len = LENGTH, .lkey = from->stag };
	struct rk_send reg = whole_region(to, to->stag | 1);
	const size_t begin = 3 * PAGE_SIZE, len = 2 * PAGE_SIZE;
	size_t at;

	EXPECT(!register_fast(b, &reg));
	fill(from, 1);
	EXPECT(!post_range(a, RK_WRITE, 80, part, IOVA, reg.rkey));
	EXPECT(!transfer(a, b, 1448));
	EXPECT(!count_differences(from, to));
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
	EXPECT(!post_range(a, RK_WRITE, 81, part, reg.remote_addr, reg.rkey));
	EXPECT(!transfer(a, b, 1448));
	for (at = FIRST; at < FIRST + LENGTH; at++) {
		bool again = at >= begin && at < begin + len;

		EXPECT(*byte_at(to, at) == *byte_at(from, again ? at - begin + FIRST : at));
	}
	EXPECT(a->sends == 2 && !a->failures && !b->failures);
	EXPECT(!invalidate(b, reg.rkey));

	reg = whole_region(to, to->stag | 3);
	reg.num_pages++;
	EXPECT(register_fast(b, &reg) == -EACCES);
	return 0;
}

/* Runs a test with a region at `a`, and a region for fast registrations at `b`. */
static int with_pages(struct pair *pair,
		      int (*run)(struct pair *, struct scattered *, struct scattered *))
{
	struct scattered *from = kzalloc(sizeof(*from), GFP_KERNEL);
	struct scattered *to = kzalloc(sizeof(*to), GFP_KERNEL);
	int error = -ENOMEM;

	if (from && to && !alloc_scattered(from) && !alloc_scattered(to)) {
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
		free_pages_of(from);
	if (to)
		free_pages_of(to);
	kfree(from);
	kfree(to);
	return error;
}

/* Transfers between a region and a fast registration, both of scattered pages. */
int scattered_pages(struct pair *pair)
{
	return with_pages(pair, write_and_read);
}

/* Successive fast registrations of a region use different pages. */
int page_lists(struct pair *pair)
{
	return with_pages(pair, changing_page_lists);
}
