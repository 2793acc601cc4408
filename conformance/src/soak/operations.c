/* Operations: posts them, and checks their completions and effects. */
#include <arpa/inet.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "soak.h"

enum message_kind { DATA = 1, ACK, OFFER, BYE };

struct message {
	uint32_t kind, word, length;
	uint32_t padding;
	uint64_t sequence;
};

/* Tags in the top octet of a wr_id. The other bits are the request's number, the index of the
 * connection, and the index of the request or receive. */
enum { OUR_REQUEST = 1, OUR_RECEIVE = 2, SHARED_RECEIVE = 3 };

static char shared_in[SHARED][MESSAGE];
static unsigned char shared_posted[SHARED];
static struct ibv_mr *shared_mr;
static uint32_t last_number;

static uint64_t wr_id(int tag, uint32_t number, const struct pair *p, int place)
{
	return (uint64_t)tag << 56 | (uint64_t)(number & 0xffffff) << 32 |
		(uint64_t)(p - pairs) << 16 | (uint64_t)place;
}

static uint64_t seed_of(uint64_t side, uint64_t sequence, int what)
{
	return side ^ (sequence << 8) ^ (uint64_t)what << 60;
}

static void post_receive(struct pair *p, int place)
{
	struct ibv_sge sge = { (uintptr_t)p->arena->in[place], MESSAGE, p->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id(OUR_RECEIVE, 0, p, place), .sg_list = &sge,
				  .num_sge = 1 }, *bad;
	int status = ibv_post_recv(p->id->qp, &wr, &bad);

	if (status)
		wrong("connection %d: ibv_post_recv: %s", p->index, strerror(status));
	p->receive_posted[place] = 1;
	p->received_posted++;
}

void post_shared(int place)
{
	struct ibv_sge sge = { (uintptr_t)shared_in[place], MESSAGE, 0 };
	struct ibv_recv_wr wr = { .wr_id = (uint64_t)SHARED_RECEIVE << 56 | place, .sg_list = &sge,
				  .num_sge = 1 }, *bad;
	int status;

	if (!shared_mr)
		shared_mr = ibv_reg_mr(pd, shared_in, sizeof(shared_in), IBV_ACCESS_LOCAL_WRITE);
	if (!shared_mr)
		wrong("ibv_reg_mr: %s", strerror(errno));
	sge.lkey = shared_mr->lkey;
	status = ibv_post_srq_recv(srq, &wr, &bad);
	if (status || shared_posted[place])
		wrong("ibv_post_srq_recv of %d: %s", place, strerror(status));
	shared_posted[place] = 1;
}

/* Initializes the memory and posts the receives of a connection whose queue pair exists. */
void start_operations(struct pair *p)
{
	fill(p->arena->exposed.read, SLOT, p->mine, 0);
	for (int i = 0; i < RECEIVES && !p->shared; i++)
		post_receive(p, i);
}

/* Allocates a request. The caller has checked that one is free. */
static struct request *allocate_request(struct pair *p, enum kind kind, int signaled)
{
	int place = 0;

	while (p->requests[place].posted)
		place++;
	p->requests[place] = (struct request){ .kind = kind, .posted = 1, .signaled = signaled,
					       .number = ++last_number & 0xffffff };
	p->order[p->in_flight++] = (unsigned char)place;
	return &p->requests[place];
}

static char *buffer(const struct pair *p, const struct request *r)
{
	return p->arena->out[r - p->requests];
}

static void post(struct pair *p, struct request *r, struct ibv_send_wr wr, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)buffer(p, r), length, p->mr->lkey };
	struct ibv_send_wr *bad;
	int status;

	wr.wr_id = wr_id(OUR_REQUEST, r->number, p, (int)(r - p->requests));
	wr.sg_list = &sge;
	wr.num_sge = wr.opcode == IBV_WR_BIND_MW || wr.opcode == IBV_WR_LOCAL_INV ? 0 : 1;
	wr.send_flags |= r->signaled ? IBV_SEND_SIGNALED : 0;
	r->length = length;
	status = ibv_post_send(p->id->qp, &wr, &bad);
	if (!status)
		return;
	/* The queue pair may have failed, but its completions were not polled yet. */
	r->posted = 0;
	p->in_flight--;
	if (status != EINVAL && status != ENOTCONN)
		wrong("connection %d: ibv_post_send: %s", p->index, strerror(status));
	lose(p, "post");
}

/* Posts a Send. It consumes a credit, unless it is an acknowledgement. */
static void send_message(struct pair *p, uint32_t kind, uint32_t word, uint32_t length,
			 uint32_t invalidate)
{
	struct request *r = allocate_request(p, invalidate ? SEND_INV : SEND, 1);
	struct message m = { .kind = kind, .word = word, .length = length,
			     .sequence = kind == ACK ? 0 : ++p->sent };
	struct ibv_send_wr wr = { .opcode = invalidate ? IBV_WR_SEND_WITH_INV : IBV_WR_SEND,
				  .invalidate_rkey = invalidate };

	memcpy(buffer(p, r), &m, sizeof(m));
	fill(buffer(p, r) + sizeof(m), length, seed_of(p->mine, m.sequence, SEND), 0);
	if (!invalidate && length < 32)
		wr.send_flags |= IBV_SEND_INLINE;
	post(p, r, wr, (uint32_t)sizeof(m) + length);
}

static struct ibv_send_wr remote(const struct pair *p, enum ibv_wr_opcode opcode, uint64_t offset)
{
	struct ibv_send_wr wr = { .opcode = opcode };

	wr.wr.rdma.remote_addr = p->remote + offset;
	wr.wr.rdma.rkey = p->rkey;
	return wr;
}

static uint32_t random_length(uint32_t most)
{
	/* Three of four messages are short. */
	return 1 + (uint32_t)(number() % (number() % 4 ? 512 : most));
}

/* Posts a Write, signaled or not, and a Read of the same memory. */
static void write_and_read_back(struct pair *p)
{
	uint64_t seed = number();
	uint32_t length = random_length(SLOT);
	struct request *r;
	int slot = 0;

	while (slot < SLOTS && p->slot_busy[slot])
		slot++;
	if (slot == SLOTS || p->in_flight + 2 > DEPTH)
		return;
	p->slot_busy[slot] = 1;
	r = allocate_request(p, WRITE, number() % 2 == 0);
	fill(buffer(p, r), length, seed, 0);
	post(p, r, remote(p, IBV_WR_RDMA_WRITE, offsetof(struct exposed, written[slot])), length);
	if (p->state != LIVE)
		return;
	r = allocate_request(p, READ_BACK, 1);
	r->seed = seed;
	r->slot = slot;
	memset(buffer(p, r), 0x55, length);
	post(p, r, remote(p, IBV_WR_RDMA_READ, offsetof(struct exposed, written[slot])), length);
}

static void write_with_immediate(struct pair *p)
{
	int slot = (int)(number() % SLOTS);
	struct ibv_send_wr wr = remote(p, IBV_WR_RDMA_WRITE_WITH_IMM,
				       offsetof(struct exposed, announced[slot]));
	uint32_t length = random_length(SLOT);
	struct request *r;

	if (p->announced_until[slot] > p->acknowledged)
		return;
	r = allocate_request(p, WRITE_IMM, 1);
	p->announced_until[slot] = ++p->sent;
	fill(buffer(p, r), length, seed_of(p->mine, p->sent, WRITE_IMM), 0);
	wr.imm_data = htonl((uint32_t)(p->sent << 2) | (uint32_t)slot);
	post(p, r, wr, length);
}

static void read_remote(struct pair *p)
{
	uint32_t length = random_length(SLOT / 2), offset = (uint32_t)(number() % (SLOT / 2)) & ~7u;
	struct request *r = allocate_request(p, READ, 1);

	r->seed = offset;
	memset(buffer(p, r), 0x55, length);
	post(p, r, remote(p, IBV_WR_RDMA_READ, offsetof(struct exposed, read) + offset), length);
}

static void atomic(struct pair *p, int swap)
{
	struct ibv_send_wr wr = {
		.opcode = swap ? IBV_WR_ATOMIC_CMP_AND_SWP : IBV_WR_ATOMIC_FETCH_AND_ADD,
	};
	struct request *r = allocate_request(p, swap ? COMPARE_SWAP : FETCH_ADD, 1);
	uint64_t operand = number();

	r->expected = p->counter;
	wr.wr.atomic.remote_addr = p->remote + offsetof(struct exposed, counter);
	wr.wr.atomic.rkey = p->rkey;
	wr.wr.atomic.compare_add = operand;
	if (!swap) {
		p->counter += operand;
	} else if (operand % 2) {
		/* Half of the comparisons succeed. */
		wr.wr.atomic.compare_add = p->counter;
		wr.wr.atomic.swap = p->counter = number();
	} else if (operand == p->counter) {
		wr.wr.atomic.compare_add++;
	}
	memset(buffer(p, r), 0x55, 8);
	post(p, r, wr, 8);
}

/* Binds the window, and then offers it to the peer or invalidates it. */
static void bind_window(struct pair *p)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_BIND_MW };
	struct request *r;

	if (p->window_open || p->in_flight + 2 > DEPTH)
		return;
	r = allocate_request(p, BIND, 1);
	p->window_key = ibv_inc_rkey(p->window_key);
	wr.bind_mw.mw = p->mw;
	wr.bind_mw.rkey = p->window_key;
	wr.bind_mw.bind_info = (struct ibv_mw_bind_info){ p->mr,
		(uintptr_t)p->arena->exposed.window,
							  WINDOW, IBV_ACCESS_REMOTE_WRITE };
	post(p, r, wr, 0);
	if (p->state != LIVE)
		return;
	if (number() % 4) {
		p->window_open = 1;
		send_message(p, OFFER, p->window_key, 0, 0);
		return;
	}
	r = allocate_request(p, LOCAL_INV, 1);
	post(p, r, (struct ibv_send_wr){ .opcode = IBV_WR_LOCAL_INV,
					 .invalidate_rkey = p->window_key }, 0);
}

/* Responds to an offer: writes through the window, and invalidates it with a Send. */
static void use_window(struct pair *p, uint32_t key)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE };
	struct request *r = allocate_request(p, WRITE_WINDOW, 1);

	fill(buffer(p, r), WINDOW, seed_of(p->mine, key, WRITE_WINDOW), 0);
	wr.wr.rdma.remote_addr = p->remote + offsetof(struct exposed, window);
	wr.wr.rdma.rkey = key;
	post(p, r, wr, WINDOW);
	if (p->state == LIVE)
		send_message(p, DATA, 0, (uint32_t)(number() % 256), key);
}

static int may_send(const struct pair *p)
{
	/* Reserves one credit for the response to an offer. */
	return p->in_flight + 1 < DEPTH && p->sent - p->acknowledged + 2 < CREDITS;
}

void say_farewell(struct pair *p)
{
	p->farewell_sent = 1;
	send_message(p, BYE, 0, 0, 0);
}

int idle(const struct pair *p)
{
	return p->in_flight == 0 && p->sent == p->acknowledged && !p->window_open && !p->offer &&
		p->unacknowledged == 0;
}

void issue(struct pair *p)
{
	static const enum kind choice[] = { SEND, SEND, SEND, WRITE, WRITE, WRITE_IMM, WRITE_IMM,
					    READ, READ, FETCH_ADD, COMPARE_SWAP, BIND };

	if (!p->may_speak)
		return;
	/* After a farewell, acknowledge every message. */
	if (p->unacknowledged >= (p->farewell_sent || p->farewell_received ? 1 : ACKNOWLEDGE) &&
	    p->in_flight < DEPTH) {
		uint32_t n = (uint32_t)p->unacknowledged;
		p->unacknowledged = 0;
		send_message(p, ACK, n, 0, 0);
	}
	if (p->offer && p->state == LIVE && p->in_flight + 2 <= DEPTH) {
		uint32_t key = p->offer;
		p->offer = 0;
		use_window(p, key);
	}
	for (int tries = 0; tries < 3 && p->state ==
		LIVE && !p->farewell_sent && !p->farewell_received &&
	     may_send(p); tries++) {
		switch (choice[number() % (sizeof(choice) / sizeof(*choice))]) {
		case SEND:
			send_message(p, DATA, 0, random_length(MESSAGE - sizeof(struct message)),
				     0);
			break;
		case WRITE:
			write_and_read_back(p);
			break;
		case WRITE_IMM:
			write_with_immediate(p);
			break;
		case READ:
			read_remote(p);
			break;
		case BIND:
			bind_window(p);
			break;
		default:
			atomic(p, number() % 2 == 0);
		}
	}
}

/* Checks the result of a completed request. */
static void completed(struct pair *p, const struct request *r)
{
	const char *b = buffer(p, r);
	uint64_t found;

	totals.done[r->kind]++;
	switch (r->kind) {
	case READ_BACK:
		verify(b, r->length, r->seed, 0, p, "a Write that was read back");
		p->slot_busy[r->slot] = 0;
		break;
	case READ:
		verify(b, r->length, p->theirs, r->seed, p, "a Read");
		break;
	case FETCH_ADD:
	case COMPARE_SWAP:
		memcpy(&found, b, 8);
		if (found != r->expected)
			wrong("connection %d: an atomic operation found %lx instead of %lx",
			      p->index, found, r->expected);
		break;
	default:
		break;
	}
}

/* Checks a completion: it must be for the oldest signaled request. Earlier unsignaled requests are
 * then complete, too. */
static void request_completed(const struct ibv_wc *wc)
{
	struct pair *p = &pairs[wc->wr_id >> 16 & 0xffff];
	int place = wc->wr_id & 0xffff, at = 0;
	struct request *r = &p->requests[place];

	if (p->state == NONE || !r->posted || r->number != (wc->wr_id >> 32 & 0xffffff))
		wrong("connection %d: request %lx has two completions", p->index, wc->wr_id);
	while (p->order[at] != place) {
		if (p->requests[p->order[at]].signaled)
			wrong("connection %d: request %lx completes before an earlier one",
			      p->index, wc->wr_id);
		p->requests[p->order[at]].posted = 0;
		totals.done[p->requests[p->order[at]].kind] += wc->status == IBV_WC_SUCCESS;
		at++;
	}
	if (wc->status == IBV_WC_SUCCESS) {
		if (!r->signaled)
			wrong("connection %d: a completion of an unsignaled request", p->index);
		completed(p, r);
	}
	r->posted = 0;
	p->in_flight -= at + 1;
	memmove(p->order, p->order + at + 1, (size_t)p->in_flight);
}

static void message_arrived(struct pair *p, const char *in, const struct ibv_wc *wc)
{
	struct message m;

	memcpy(&m, in, sizeof(m));
	if (wc->byte_len != sizeof(m) + m.length)
		wrong("connection %d: %u octets instead of %u", p->index, wc->byte_len,
		      (uint32_t)sizeof(m) + m.length);
	verify(in + sizeof(m), m.length, seed_of(p->theirs, m.sequence, SEND), 0, p, "a Send");
	if (m.kind == ACK) {
		p->acknowledged += m.word;
		if (p->acknowledged > p->sent)
			wrong("connection %d: more messages arrived than were sent", p->index);
		return;
	}
	if (m.sequence != ++p->received)
		wrong("connection %d: message %lu instead of %lu", p->index, m.sequence,
		      p->received);
	p->unacknowledged++;
	totals.messages++;
	if (wc->wc_flags & IBV_WC_WITH_INV) {
		if (!p->window_open || wc->invalidated_rkey != p->window_key)
			wrong("connection %d: %x was invalidated instead of %x", p->index,
			      wc->invalidated_rkey, p->window_key);
		verify(p->arena->exposed.window, WINDOW,
		       seed_of(p->theirs, p->window_key, WRITE_WINDOW), 0, p,
			       "a Write through a window");
		p->window_open = 0;
		totals.invalidated++;
	} else if (m.kind == OFFER) {
		p->offer = m.word;
	} else if (m.kind == BYE) {
		p->farewell_received = 1;
	}
}

static void arrived(struct pair *p, const char *in, const struct ibv_wc *wc)
{
	uint32_t imm = ntohl(wc->imm_data);

	if (wc->opcode != IBV_WC_RECV_RDMA_WITH_IMM) {
		message_arrived(p, in, wc);
		return;
	}
	p->received++;
	if (imm >> 2 != (uint32_t)p->received << 2 >> 2)
		wrong("connection %d: immediate data %x instead of message %lu", p->index, imm,
		      p->received);
	verify(p->arena->exposed.announced[imm % SLOTS], wc->byte_len,
	       seed_of(p->theirs, p->received, WRITE_IMM), 0, p,
	       "a Write with immediate data");
	p->unacknowledged++;
	totals.announced++;
}

static struct pair *by_number(uint32_t qp_num)
{
	for (int i = 0; i < PLACES; i++)
		if (pairs[i].state >= CONNECTING && pairs[i].id->qp &&
		    pairs[i].id->qp->qp_num == qp_num)
			return &pairs[i];
	wrong("a completion of an unknown queue pair");
}

static void failed(struct pair *p, const struct ibv_wc *wc)
{
	static const char *const what[] = { "", "request", "receive", "shared receive" };

	if (wc->status == IBV_WC_WR_FLUSH_ERR)
		totals.flushed++;
	else
		totals.other_errors++;
	switch (wc->status) {
	case IBV_WC_WR_FLUSH_ERR:
	case IBV_WC_RETRY_EXC_ERR:
	case IBV_WC_FATAL_ERR:
	case IBV_WC_RESP_TIMEOUT_ERR:
	case IBV_WC_REM_ABORT_ERR:
	case IBV_WC_GENERAL_ERR:
		break;
	default:
		wrong("connection %d: a %s failed with an unexpected status: %s", p->index,
			what[wc->wr_id >> 56],
		      ibv_wc_status_str(wc->status));
	}
	if (!p->failure)
		p->failure = ibv_wc_status_str(wc->status);
}

static void take_completion(const struct ibv_wc *wc)
{
	int tag = (int)(wc->wr_id >> 56), place = wc->wr_id & 0xffff;
	struct pair *p = tag ==
		SHARED_RECEIVE ? by_number(wc->qp_num) : &pairs[wc->wr_id >> 16 & 0xffff];

	if (tag == OUR_REQUEST) {
		request_completed(wc);
	} else {
		unsigned char *posted = tag ==
			SHARED_RECEIVE ? &shared_posted[place] : &p->receive_posted[place];

		if (!*posted)
			wrong("connection %d: receive %d has two completions", p->index, place);
		*posted = 0;
		p->may_speak = 1;
		if (wc->status == IBV_WC_SUCCESS)
			arrived(p, tag == SHARED_RECEIVE ? shared_in[place] : p->arena->in[place],
				wc);
		if (tag == SHARED_RECEIVE) {
			post_shared(place);
		} else {
			p->received_posted--;
			if (p->state != DRAINING && wc->status == IBV_WC_SUCCESS)
				post_receive(p, place);
		}
	}
	if (wc->status != IBV_WC_SUCCESS)
		failed(p, wc);
}

int poll_completions(void)
{
	struct ibv_wc wc[32];
	int all = 0;

	for (int q = 0; q < 2 && queues[q]; q++) {
		int n = ibv_poll_cq(queues[q], 32, wc);
		if (n < 0)
			wrong("a completion queue has overflowed");
		for (int i = 0; i < n; i++)
			take_completion(&wc[i]);
		all += n;
	}
	return all;
}

void handle_failures(void)
{
	int any_failed = 0;

	for (int i = 0; i < PLACES; i++)
		any_failed |= pairs[i].state >= CONNECTING && pairs[i].failure;
	/* The requests of a failed connection complete in another queue than its receives, so some
	 * successful completions may still be pending. */
	while (any_failed && poll_completions())
		;
	for (int i = 0; any_failed && i < PLACES; i++) {
		const char *why = pairs[i].failure;

		pairs[i].failure = NULL;
		if (why && pairs[i].state >= CONNECTING)
			lose(&pairs[i], why);
	}
}
