// SPDX-License-Identifier: MIT OR Apache-2.0
/* Tests without a network: the bytes that one queue pair sends are copied to the other. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/random.h>
#include <linux/string.h>

#include "test.h"

/*
 * Passes bytes to an endpoint, at most `piece` at a time. Returns 0, RK_RX_HELD, or the error of
 * the stream.
 */
static int feed(struct endpoint *to, const u8 *octets, size_t len, size_t piece)
{
	while (len) {
		const struct kvec *runs;
		int status, n;
		size_t part;

		n = rk_rx_plan(to->qp, to->device, &runs);
		if (n < 1)
			return -EPROTO;
		part = min3(piece, len, runs[0].iov_len);
		memcpy(runs[0].iov_base, octets, part);
		status = rk_rx_filled(to->qp, to->device, part);
		if (status)
			return status;
		octets += part;
		len -= part;
	}
	return 0;
}

/*
 * Copies all data that `from` sends to `to`, at most `piece` bytes at a time. Returns 0 if `from`
 * has no more data, -EFAULT if the sender's stream fails, or the result of feed() if not 0.
 */
int transfer(struct endpoint *from, struct endpoint *to, size_t piece)
{
	for (;;) {
		const struct kvec *runs;
		size_t total = 0;
		int n, i, status;

		switch (rk_tx_fill(from->qp, from->device)) {
		case RK_FILL_IDLE:
			return 0;
		case RK_FILL_MEMORY:
			rk_tx_memory(from->qp, from->device);
			continue;
		case RK_FILL_MORE:
			continue;
		}
		n = rk_tx_runs(from->qp, from->device, &runs);
		if (n < 0)
			return n;
		for (i = 0; i < n; i++) {
			status = feed(to, runs[i].iov_base, runs[i].iov_len, piece);
			if (status)
				return status;
			total += runs[i].iov_len;
		}
		rk_tx_written(from->qp, from->device, total);
	}
}

static bool buffers_equal(const struct pair *pair)
{
	return !memcmp(pair->a.buffer, pair->b.buffer, BUFFER);
}

int write_in_pieces(struct pair *pair)
{
	static const size_t pieces[] = { 1 << 20, 1448, 7 };
	struct endpoint *a = &pair->a, *b = &pair->b;
	int i;

	for (i = 0; i < ARRAY_SIZE(pieces); i++) {
		pattern(a->buffer, BUFFER, i + 1);
		memset(b->buffer, 0, BUFFER);
		EXPECT(!post(a, RK_WRITE, 10 + i, b));
		EXPECT(!transfer(a, b, pieces[i]));
		EXPECT(buffers_equal(pair));
		EXPECT(a->sends == i + 1 && !a->failures && !b->failures);
		EXPECT(a->last_send.wr_id == 10 + i);
	}
	return 0;
}

int read_back(struct pair *pair)
{
	struct endpoint *a = &pair->a, *b = &pair->b;

	pattern(b->buffer, BUFFER, 5);
	EXPECT(!post(a, RK_READ, 20, b));
	EXPECT(!transfer(a, b, 1448));
	EXPECT(!a->sends);
	EXPECT(!transfer(b, a, 1448));
	EXPECT(a->sends == 1 && !a->failures);
	EXPECT(a->last_send.byte_len == BUFFER);
	EXPECT(buffers_equal(pair));
	return 0;
}

int send_to_receive(struct pair *pair)
{
	struct endpoint *a = &pair->a, *b = &pair->b;

	pattern(a->buffer, BUFFER, 6);
	EXPECT(!post_receive(b, 30));
	EXPECT(!post(a, RK_SEND, 31, b));
	EXPECT(!transfer(a, b, 1448));
	EXPECT(b->receives == 1 && b->last_receive.wr_id == 30);
	EXPECT(b->last_receive.byte_len == BUFFER);
	EXPECT(a->sends == 1 && !a->failures && !b->failures);
	EXPECT(buffers_equal(pair));
	return 0;
}

/*
 * b registers its buffer by a work request. a writes to it and invalidates it by a Send. a's next
 * Write is refused.
 */
int fast_registration(struct pair *pair)
{
	struct endpoint *a = &pair->a, *b = &pair->b;
	const u64 base = 0x7f0000001000;
	u64 list[BUFFER / PAGE_SIZE];
	u32 stag = rk_allocate_fast(b->device, list, ARRAY_SIZE(list), PD, get_random_u32());
	struct rk_send reg = {
		.remote_addr = base,
		.len = BUFFER,
		.rkey = (stag & ~0xff) | 0x42,
		.num_pages = ARRAY_SIZE(list),
	};
	struct rk_sge whole = {
		.addr = (unsigned long)a->buffer,
		.len = BUFFER,
		.lkey = a->stag,
	};
	int i;

	EXPECT(stag);
	for (i = 0; i < ARRAY_SIZE(list); i++)
		list[i] = (unsigned long)b->buffer + i * PAGE_SIZE;
	EXPECT(!register_fast(b, &reg));

	pattern(a->buffer, BUFFER, 7);
	EXPECT(!post_range(a, RK_WRITE, 41, whole, base, reg.rkey));
	EXPECT(!transfer(a, b, 1448));
	EXPECT(buffers_equal(pair));

	EXPECT(!post_receive(b, 43));
	EXPECT(!post_range(a, RK_SEND_INV, 42, (struct rk_sge){}, 0, reg.rkey));
	EXPECT(!transfer(a, b, 1448));
	EXPECT(b->receives == 1 && b->last_receive.imm_or_stag == reg.rkey);
	EXPECT(a->sends == 2 && !a->failures && !b->failures);

	memset(a->buffer, 0, BUFFER);
	EXPECT(!post_range(a, RK_WRITE, 44, whole, base, reg.rkey));
	EXPECT(transfer(a, b, 1448) == -EPROTO);
	pattern(a->buffer, BUFFER, 7);
	EXPECT(buffers_equal(pair));
	EXPECT(rk_qp_state(b->qp) == RK_STATE_ERROR);
	EXPECT(!rk_deregister(b->device, reg.rkey));
	return 0;
}

/*
 * The last byte of a Write is outside of the region: no byte of its FPDU is placed, the stream
 * ends, and posted requests are flushed.
 */
int write_beyond_region(struct pair *pair)
{
	struct endpoint *a = &pair->a, *b = &pair->b;
	struct rk_sge part = {
		.addr = (unsigned long)a->buffer,
		.len = 1024,
		.lkey = a->stag,
	};
	const u64 to = (unsigned long)b->buffer + BUFFER - 1023;
	int i;

	pattern(a->buffer, BUFFER, 8);
	EXPECT(!post_receive(b, 51));
	EXPECT(!post_range(a, RK_WRITE, 50, part, to, b->stag));
	EXPECT(transfer(a, b, 1448) == -EPROTO);
	for (i = 0; i < BUFFER; i++)
		EXPECT(!b->buffer[i]);
	EXPECT(rk_qp_state(b->qp) == RK_STATE_ERROR);
	EXPECT(b->receives == 1 && b->last_receive.status);
	EXPECT(transfer(b, a, 1448) == -EPROTO);
	EXPECT(rk_qp_state(a->qp) == RK_STATE_ERROR);
	return 0;
}

/* One byte of a Send is changed: the CRC detects that, and no byte is placed. */
int wrong_crc(struct pair *pair)
{
	struct endpoint *a = &pair->a, *b = &pair->b;
	const struct kvec *runs;
	u8 octets[64];
	struct rk_sge part = {
		.addr = (unsigned long)a->buffer,
		.len = 16,
		.lkey = a->stag,
	};
	int i;

	EXPECT(!post_receive(b, 61));
	EXPECT(!post_range(a, RK_SEND, 60, part, 0, 0));
	EXPECT(rk_tx_fill(a->qp, a->device) == RK_FILL_READY);
	EXPECT(rk_tx_runs(a->qp, a->device, &runs) == 1);
	EXPECT(runs[0].iov_len <= sizeof(octets));
	memcpy(octets, runs[0].iov_base, runs[0].iov_len);
	octets[runs[0].iov_len - 8] ^= 1;
	EXPECT(feed(b, octets, runs[0].iov_len, 1448) == -EPROTO);
	EXPECT(b->receives == 1 && b->last_receive.status);
	for (i = 0; i < 16; i++)
		EXPECT(!b->buffer[i]);
	return 0;
}
