/* Ring entries for hostile.c, valid or invalid, the memory regions they refer to, and random
 * numbers. */
#ifndef HOSTILE_H
#define HOSTILE_H

#include <infiniband/verbs.h>
#include <rdma/siw-abi.h>
#include <stddef.h>
#include <stdint.h>

#define PAGE 4096ul
#define ARENA 64 /* pages */

/* A registered range of the arena. The contents of a range may change only if it is `writable`. */
struct region {
	size_t offset, len;
	int access, writable;
	struct ibv_mr *mr;
};

enum { OPEN, NO_ACCESS, REVOKED, REGIONS };
static struct region regions[REGIONS] = {
	[OPEN] = { 8 * PAGE, 16 * PAGE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
		   IBV_ACCESS_REMOTE_READ, 1, NULL },
	[NO_ACCESS] = { 32 * PAGE + 100, 5000, 0, 0, NULL },
	/* Deregistered in the middle of a connection. */
	[REVOKED] = { 40 * PAGE + 8, 2 * PAGE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, 1,
		    NULL },
};

static unsigned char *arena;
/* One in this many requests is invalid (twice or eight times as many receives and receive
 * fields). */
static uint32_t invalid_interval;
/* The second process's buffer address and STag, which this process must not be able to use. */
static uint64_t victim_address;
static uint32_t victim_stag;

static __thread uint64_t state;

static uint64_t random64(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state * 0x2545f4914f6cdd1d;
}

static uint32_t random_below(uint32_t n)
{
	return (uint32_t)(((random64() >> 32) * n) >> 32);
}

static uint32_t some_stag(void)
{
	switch (random_below(12)) {
	case 0:
		return (uint32_t)random64();
	case 1:
		return victim_stag;
	case 2:
		return regions[NO_ACCESS].mr->lkey;
	case 3:
		return regions[REVOKED].mr ? regions[REVOKED].mr->lkey : 0;
	case 4:
		return regions[OPEN].mr->lkey ^ (1u << random_below(32));
	default:
		return regions[OPEN].mr->lkey;
	}
}

static uint64_t some_address(void)
{
	const struct region *region = &regions[random_below(8) ? OPEN : random_below(REGIONS)];
	uint64_t start = (uintptr_t)arena + region->offset;

	switch (random_below(24)) {
	case 0:
		return random64();
	case 1:
		return victim_address;
	case 2:
		return start - 1;
	case 3:
		return start + region->len - random_below(64);
	case 4:
		return 0xffff888000000000 + (random64() & 0x3fffffff);
	case 5:
		return UINT64_MAX - random_below(4096);
	default:
		return start + random_below((uint32_t)region->len / 2);
	}
}

static uint32_t some_length(void)
{
	switch (random_below(16)) {
	case 0:
		return (uint32_t)random64();
	case 1:
		return 0;
	case 2:
		return UINT32_MAX - random_below(64);
	case 3:
		return random_below(32 * PAGE);
	default:
		return random_below(2000);
	}
}

static void random_sges(struct siw_sge *sges)
{
	for (int i = 0; i < SIW_MAX_SGE; i++)
		sges[i] = (struct siw_sge){ some_address(), some_length(), some_stag() };
}

static void random_words(void *to, size_t octets)
{
	uint64_t *word = to;

	for (size_t i = 0; i < octets / 8; i++)
		word[i] = random64();
}

/* Fills in scatter/gather elements within the region OPEN. */
static void valid_sges(struct siw_sge *sges, uint32_t least, uint32_t most)
{
	for (int i = 0; i < SIW_MAX_SGE; i++)
		sges[i] =
			(struct siw_sge){ (uintptr_t)arena + regions[OPEN].offset +
					  random_below(8 * PAGE),
					    least + random_below(most - least),
						regions[OPEN].mr->lkey };
}

static void valid_send(struct siw_sqe *entry)
{
	static const uint8_t usual[] = { SIW_OP_WRITE, SIW_OP_READ, SIW_OP_SEND };

	entry->flags &= SIW_WQE_SIGNALLED | SIW_WQE_SOLICITED | SIW_WQE_READ_FENCE;
	entry->opcode = usual[random_below(3)];
	entry->num_sge = (uint8_t)(entry->opcode ==
		SIW_OP_READ ? 1 : random_below(SIW_MAX_SGE + 1));
	entry->rkey = regions[OPEN].mr->lkey;
	entry->raddr = (uintptr_t)arena + regions[OPEN].offset + random_below(4 * PAGE);
	valid_sges(entry->sge, 0, 1300);
	if (entry->opcode != SIW_OP_READ && !random_below(6)) {
		entry->flags |= SIW_WQE_INLINE;
		/* The length of inline data is in the first element. */
		entry->sge[0].length = random_below(SIW_MAX_INLINE + 1);
	}
}

/* Changes one or a few fields of a valid request. */
static void corrupt_send(struct siw_sqe *entry)
{
	do
		switch (random_below(9)) {
		case 0:
			entry->opcode =
				(uint8_t)(random_below(2) ? SIW_OP_SEND_REMOTE_INV : random64());
			break;
		case 1:
			entry->num_sge = (uint8_t)random64();
			break;
		case 2:
			entry->rkey = some_stag();
			break;
		case 3:
			entry->raddr = some_address();
			break;
		case 4:
			random_sges(entry->sge);
			break;
		case 5:
			entry->sge[random_below(2)].length = some_length();
			break;
		case 6:
			entry->sge[0].laddr = some_address();
			break;
		case 7:
			entry->flags ^= (uint16_t)(random_below(4) ? SIW_WQE_INLINE : random64());
			break;
		default:
			random_words(entry, sizeof *entry);
		}
	while (random_below(2));
}

static void send_entry(struct siw_sqe *entry)
{
	random_words(entry, sizeof *entry);
	valid_send(entry);
	if (!random_below(invalid_interval))
		corrupt_send(entry);
}

static void receive_entry(struct siw_rqe *entry)
{
	random_words(entry, sizeof *entry);
	if (!random_below(8 * invalid_interval))
		return;
	entry->flags = 0;
	entry->num_sge = (uint8_t)(1 + random_below(SIW_MAX_SGE));
	valid_sges(entry->sge, 8000, 9000);
	if (!random_below(4 * invalid_interval))
		entry->num_sge = (uint8_t)random64();
	if (!random_below(4 * invalid_interval))
		random_sges(entry->sge);
}

#endif
