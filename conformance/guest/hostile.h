/* Entries of hostile.c: the memory that they may name, random numbers, and valid or invalid
 * entries. */
#ifndef HOSTILE_H
#define HOSTILE_H

#include <infiniband/verbs.h>
#include <rdma/siw-abi.h>
#include <stddef.h>
#include <stdint.h>

#define PAGE 4096ul
#define ARENA 64 /* pages */

/* A registered range of the arena. Only `writable` ranges may change. */
struct region {
	size_t at, len;
	int access, writable;
	struct ibv_mr *mr;
};

enum { OPEN, QUIET, GOING, REGIONS };
static struct region regions[REGIONS] = {
	[OPEN] = { 8 * PAGE, 16 * PAGE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
		   IBV_ACCESS_REMOTE_READ, 1, NULL },
	[QUIET] = { 32 * PAGE + 100, 5000, 0, 0, NULL },
	/* Deregistered in the middle of a connection. */
	[GOING] = { 40 * PAGE + 8, 2 * PAGE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, 1,
		    NULL },
};

static unsigned char *arena;
/* One in this many requests is invalid. */
static uint32_t wildness;
/* The second process's keys, for guesses. */
static uint64_t victim_address;
static uint32_t victim_stag;

static __thread uint64_t state;

static uint64_t any(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state * 0x2545f4914f6cdd1d;
}

static uint32_t below(uint32_t n)
{
	return (uint32_t)(((any() >> 32) * n) >> 32);
}

static uint32_t some_stag(void)
{
	switch (below(12)) {
	case 0:
		return (uint32_t)any();
	case 1:
		return victim_stag;
	case 2:
		return regions[QUIET].mr->lkey;
	case 3:
		return regions[GOING].mr ? regions[GOING].mr->lkey : 0;
	case 4:
		return regions[OPEN].mr->lkey ^ (1u << below(32));
	default:
		return regions[OPEN].mr->lkey;
	}
}

static uint64_t some_address(void)
{
	const struct region *region = &regions[below(8) ? OPEN : below(REGIONS)];
	uint64_t at = (uintptr_t)arena + region->at;

	switch (below(24)) {
	case 0:
		return any();
	case 1:
		return victim_address;
	case 2:
		return at - 1;
	case 3:
		return at + region->len - below(64);
	case 4:
		return 0xffff888000000000 + (any() & 0x3fffffff);
	case 5:
		return UINT64_MAX - below(4096);
	default:
		return at + below((uint32_t)region->len / 2);
	}
}

static uint32_t some_length(void)
{
	switch (below(16)) {
	case 0:
		return (uint32_t)any();
	case 1:
		return 0;
	case 2:
		return UINT32_MAX - below(64);
	case 3:
		return below(32 * PAGE);
	default:
		return below(2000);
	}
}

static void elements(struct siw_sge *sges)
{
	for (int i = 0; i < SIW_MAX_SGE; i++)
		sges[i] = (struct siw_sge){ some_address(), some_length(), some_stag() };
}

static void words(void *to, size_t octets)
{
	uint64_t *word = to;

	for (size_t i = 0; i < octets / 8; i++)
		word[i] = any();
}

/* Returns a valid request or receive. */
static void sound_elements(struct siw_sge *sges, uint32_t least, uint32_t most)
{
	for (int i = 0; i < SIW_MAX_SGE; i++)
		sges[i] = (struct siw_sge){ (uintptr_t)arena + regions[OPEN].at + below(8 * PAGE),
					    least + below(most - least), regions[OPEN].mr->lkey };
}

static void sound_send(struct siw_sqe *entry)
{
	static const uint8_t usual[] = { SIW_OP_WRITE, SIW_OP_READ, SIW_OP_SEND };

	entry->flags &= SIW_WQE_SIGNALLED | SIW_WQE_SOLICITED | SIW_WQE_READ_FENCE;
	entry->opcode = usual[below(3)];
	entry->num_sge = (uint8_t)(entry->opcode == SIW_OP_READ ? 1 : below(SIW_MAX_SGE + 1));
	entry->rkey = regions[OPEN].mr->lkey;
	entry->raddr = (uintptr_t)arena + regions[OPEN].at + below(4 * PAGE);
	sound_elements(entry->sge, 0, 1300);
	if (entry->opcode != SIW_OP_READ && !below(6)) {
		entry->flags |= SIW_WQE_INLINE;
		/* For inline data, the first length counts. */
		entry->sge[0].length = below(SIW_MAX_INLINE + 1);
	}
}

/* Changes one or a few fields of a valid request. */
static void spoil_send(struct siw_sqe *entry)
{
	do
		switch (below(9)) {
		case 0:
			entry->opcode = (uint8_t)(below(2) ? SIW_OP_SEND_REMOTE_INV : any());
			break;
		case 1:
			entry->num_sge = (uint8_t)any();
			break;
		case 2:
			entry->rkey = some_stag();
			break;
		case 3:
			entry->raddr = some_address();
			break;
		case 4:
			elements(entry->sge);
			break;
		case 5:
			entry->sge[below(2)].length = some_length();
			break;
		case 6:
			entry->sge[0].laddr = some_address();
			break;
		case 7:
			entry->flags ^= (uint16_t)(below(4) ? SIW_WQE_INLINE : any());
			break;
		default:
			words(entry, sizeof *entry);
		}
	while (below(2));
}

static void send_entry(struct siw_sqe *entry)
{
	words(entry, sizeof *entry);
	sound_send(entry);
	if (!below(wildness))
		spoil_send(entry);
}

static void receive_entry(struct siw_rqe *entry)
{
	words(entry, sizeof *entry);
	if (!below(8 * wildness))
		return;
	entry->flags = 0;
	entry->num_sge = (uint8_t)(1 + below(SIW_MAX_SGE));
	sound_elements(entry->sge, 8000, 9000);
	if (!below(4 * wildness))
		entry->num_sge = (uint8_t)any();
	if (!below(4 * wildness))
		elements(entry->sge);
}

#endif
