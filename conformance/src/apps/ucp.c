/* A program on UCX's upper layer (UCP) that checks its results: two processes, connected by their
 * workers' addresses, use every way to move data. A process exits with an error if a value differs
 * from the expected one. The first process prints a line for each way. */

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

enum { AM_ID = 7, LONGEST = 1 << 20, COUNTERS = 2, ROUNDS = 20, LENGTHS = 10 };

static const size_t lengths[LENGTHS] = { 1, 8, 64, 65, 1000, 4096, 8257, 65536, 300001, LONGEST };

/* Memory that the other process may access. */
static struct shared {
	uint64_t wide[COUNTERS];
	uint32_t narrow[COUNTERS];
	unsigned char octets[LONGEST];
} *shared;

static int first, line;
static ucp_worker_h worker;
static ucp_ep_h ep;
static ucp_rkey_h rkey;
static uint64_t remote;
static unsigned char *here, *expected;

/* The active message that came last. */
static struct {
	size_t length;
	int came;
	/* Fetches its data, if they did not come with it. */
	ucs_status_ptr_t fetching;
} am;

static void fail(const char *what, long at)
{
	fprintf(stderr, "%s process: %s (%ld): %s\n", first ? "first" : "second", what, at,
		strerror(errno));
	exit(1);
}

static void must(const char *what, ucs_status_t status)
{
	if (status != UCS_OK) {
		fprintf(stderr, "%s process: %s: %s\n", first ? "first" : "second", what,
			ucs_status_string(status));
		exit(1);
	}
}

/* Waits for a request, which may have completed at once. */
static void finish(const char *what, ucs_status_ptr_t request)
{
	ucs_status_t status;

	if (!UCS_PTR_IS_PTR(request)) {
		must(what, UCS_PTR_STATUS(request));
		return;
	}
	while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS)
		ucp_worker_progress(worker);
	ucp_request_free(request);
	must(what, status);
}

static void flush(void)
{
	ucp_request_param_t none = { 0 };

	finish("flush", ucp_ep_flush_nbx(ep, &none));
}

/* Sends octets to the other process beside UCX. */
static void tell(const void *what, size_t length)
{
	if (write(line, what, length) != (ssize_t)length)
		fail("write", (long)length);
}

/* Receives octets beside UCX, and meanwhile lets UCX make progress.
 */
static void hear(void *what, size_t length)
{
	size_t have = 0;

	while (have < length) {
		ssize_t n = read(line, (char *)what + have, length - have);

		if (n > 0)
			have += (size_t)n;
		else if (n == 0 || errno != EAGAIN)
			fail("read", (long)have);
		else if (worker)
			ucp_worker_progress(worker);
	}
}

/* A barrier of both processes. */
static void meet(char step)
{
	char theirs = 0;

	tell(&step, 1);
	hear(&theirs, 1);
	if (theirs != step)
		fail("meet", theirs);
}

static void fill(unsigned char *to, size_t length, unsigned seed)
{
	uint32_t x = seed * 2654435761u + (uint32_t)length;

	for (size_t i = 0; i < length; i++) {
		x = x * 1664525u + 1013904223u;
		to[i] = (unsigned char)(x >> 24);
	}
}

static void check(const char *what, const unsigned char *have, size_t length, unsigned seed)
{
	fill(expected, length, seed);
	for (size_t i = 0; i < length; i++)
		if (have[i] != expected[i])
			fail(what, (long)i);
}

static ucs_status_t arrived(void *arg, const void *header, size_t header_length, void *data,
			    size_t length,
			    const ucp_am_recv_param_t *param)
{
	ucp_request_param_t none = { 0 };

	(void)arg;
	if (header_length != sizeof length || memcmp(header, &length, sizeof length) != 0)
		fail("header", (long)header_length);
	am.length = length;
	am.came = 1;
	if (!(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
		memcpy(here, data, length);
		return UCS_OK;
	}
	am.fetching = ucp_am_recv_data_nbx(worker, data, here, length, &none);
	return UCS_PTR_IS_PTR(am.fetching) ? UCS_INPROGRESS : UCS_OK;
}

static void start_worker(void)
{
	ucp_params_t params = {
		.field_mask = UCP_PARAM_FIELD_FEATURES,
		.features = UCP_FEATURE_TAG | UCP_FEATURE_STREAM | UCP_FEATURE_AM |
			UCP_FEATURE_RMA | UCP_FEATURE_AMO32 |
			    UCP_FEATURE_AMO64,
	};
	ucp_worker_params_t worker_params = { 0 };
	ucp_am_handler_param_t handler = {
		.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB,
		.id = AM_ID,
		.cb = arrived,
	};
	ucp_mem_map_params_t map = {
		.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
		.length = sizeof *shared,
	};
	ucp_ep_params_t ep_params = { .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS };
	ucp_context_h context;
	ucp_address_t *address;
	ucp_mem_h memory;
	uint64_t own;
	void *key, *theirs;
	size_t length;

	must("init", ucp_init(&params, NULL, &context));
	must("worker", ucp_worker_create(context, &worker_params, &worker));
	must("handler", ucp_worker_set_am_recv_handler(worker, &handler));
	map.address = shared;
	must("map", ucp_mem_map(context, &map, &memory));

	must("address", ucp_worker_get_address(worker, &address, &length));
	tell(&length, sizeof length);
	tell(address, length);
	hear(&length, sizeof length);
	theirs = malloc(length);
	hear(theirs, length);
	ep_params.address = theirs;
	must("end point", ucp_ep_create(worker, &ep_params, &ep));

	own = (uintptr_t)shared;
	must("key", ucp_rkey_pack(context, memory, &key, &length));
	tell(&own, sizeof own);
	tell(&length, sizeof length);
	tell(key, length);
	hear(&remote, sizeof remote);
	hear(&length, sizeof length);
	theirs = malloc(length);
	hear(theirs, length);
	must("their key", ucp_ep_rkey_unpack(ep, theirs, &rkey));
}

enum way { TAG, STREAM, AM };

static void send_by(enum way way, const unsigned char *from, size_t length)
{
	ucp_request_param_t none = { 0 };

	switch (way) {
	case TAG:
		finish("send", ucp_tag_send_nbx(ep, from, length, 42 + length, &none));
		break;
	case STREAM:
		finish("send", ucp_stream_send_nbx(ep, from, length, &none));
		break;
	case AM:
		finish("send", ucp_am_send_nbx(ep, AM_ID, &length, sizeof length, from, length,
					       &none));
		break;
	}
}

static void receive_by(enum way way, size_t length)
{
	ucp_request_param_t none = { 0 };
	ucp_request_param_t all = { .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
				    .flags = UCP_STREAM_RECV_FLAG_WAITALL };
	size_t had = length;

	switch (way) {
	case TAG:
		finish("receive", ucp_tag_recv_nbx(worker, here, length, 42 + length, (ucp_tag_t)-1,
						   &none));
		break;
	case STREAM:
		finish("receive", ucp_stream_recv_nbx(ep, here, length, &had, &all));
		break;
	case AM:
		while (!am.came)
			ucp_worker_progress(worker);
		finish("fetch", am.fetching);
		had = am.length;
		am.came = 0;
		am.fetching = NULL;
		break;
	}
	if (had != length)
		fail("length", (long)had);
}

/* Messages there and back. Those of the first process have even seeds. */
static void messages(enum way way)
{
	unsigned char *text = malloc(LONGEST);

	for (unsigned round = 0; round < ROUNDS * LENGTHS; round++) {
		size_t length = lengths[round % LENGTHS];

		for (int turn = 0; turn < 2; turn++) {
			unsigned seed = round * 2 + (unsigned)turn;

			if (turn == !first) {
				fill(text, length, seed);
				send_by(way, text, length);
			} else {
				receive_by(way, length);
				check("message", here, length, seed);
			}
		}
	}
	free(text);
}

/* Each process writes to the other's memory, which the other then checks. */
static void puts_(void)
{
	ucp_request_param_t none = { 0 };
	uint64_t at = remote + offsetof(struct shared, octets);

	for (unsigned round = 0; round < LENGTHS; round++) {
		size_t length = lengths[round];

		fill(here, length, round * 2 + !first);
		finish("put", ucp_put_nbx(ep, here, length, at, rkey, &none));
		flush();
		meet('p');
		check("put", shared->octets, length, round * 2 + first);
		meet('q');
	}
}

/* Each process reads the other's memory. */
static void gets_(void)
{
	ucp_request_param_t none = { 0 };
	uint64_t at = remote + offsetof(struct shared, octets);

	for (unsigned round = 0; round < LENGTHS; round++) {
		size_t length = lengths[round];

		fill(shared->octets, length, round * 2 + !first);
		meet('g');
		memset(here, 0, length);
		finish("get", ucp_get_nbx(ep, here, length, at, rkey, &none));
		check("get", here, length, round * 2 + first);
		meet('h');
	}
}

/* Performs an operation on the other's counter. With `reply` its value before comes back, and for
 * compare and swap it holds what to put. */
static uint64_t atomic(ucp_atomic_op_t op, uint64_t operand, size_t size, size_t counter,
		       uint64_t *reply)
{
	ucp_request_param_t param = { .op_attr_mask = UCP_OP_ATTR_FIELD_DATATYPE,
				      .datatype = ucp_dt_make_contig(size) };
	size_t offset = size == sizeof(uint64_t) ? offsetof(struct shared,
							    wide) : offsetof(struct shared, narrow);
	union {
		uint64_t wide;
		uint32_t narrow;
	} value, answer = { 0 };

	if (size == sizeof value.wide) {
		value.wide = operand;
		answer.wide = reply ? *reply : 0;
	} else {
		value.narrow = (uint32_t)operand;
		answer.narrow = reply ? (uint32_t)*reply : 0;
	}
	if (reply) {
		param.op_attr_mask |= UCP_OP_ATTR_FIELD_REPLY_BUFFER;
		param.reply_buffer = &answer;
	}
	finish("atomic", ucp_atomic_op_nbx(ep, op, &value, 1, remote + offset + counter * size,
					   rkey, &param));
	if (!reply)
		flush();
	return size == sizeof value.wide ? answer.wide : answer.narrow;
}

static void is(const char *what, uint64_t have, uint64_t want)
{
	if (have != want)
		fail(what, (long)have);
}

/* Each process uses every operation on the counters of the other one. */
static void atomics(size_t size)
{
	uint64_t mask = size == sizeof(uint64_t) ? UINT64_MAX : UINT32_MAX,
		start = 0x1234567890abcdef & mask, swap;

	shared->wide[0] = shared->wide[1] = start;
	shared->narrow[0] = shared->narrow[1] = (uint32_t)start;
	meet('a');
	is("fetch and add", atomic(UCP_ATOMIC_OP_ADD, 5, size, 0, &(uint64_t){ 0 }), start);
	is("swap", atomic(UCP_ATOMIC_OP_SWAP, 0xff00ff, size, 0, &(uint64_t){ 0 }),
	   (start + 5) & mask);
	swap = 77;
	is("compare and swap, other", atomic(UCP_ATOMIC_OP_CSWAP, 1, size, 0, &swap), 0xff00ff);
	is("compare and swap, same", atomic(UCP_ATOMIC_OP_CSWAP, 0xff00ff, size, 0, &swap),
	   0xff00ff);
	atomic(UCP_ATOMIC_OP_ADD, 3, size, 0, NULL);
	is("fetch and or", atomic(UCP_ATOMIC_OP_OR, 0xf00, size, 0, &(uint64_t){ 0 }), 80);
	is("fetch and and", atomic(UCP_ATOMIC_OP_AND, 0xff0, size, 0, &(uint64_t){ 0 }), 80 |
	   0xf00);
	is("fetch and xor", atomic(UCP_ATOMIC_OP_XOR, 0xff, size, 0, &(uint64_t){ 0 }), 0xf50);
	for (int i = 0; i < ROUNDS; i++)
		atomic(UCP_ATOMIC_OP_ADD, 2, size, 1, i % 2 ? NULL : &(uint64_t){ 0 });
	meet('b');
	is("counter", size == sizeof(uint64_t) ? shared->wide[0] : shared->narrow[0], 0xf50 ^ 0xff);
	is("sum", size == sizeof(uint64_t) ? shared->wide[1] : shared->narrow[1],
	   (start + 2 * ROUNDS) & mask);
	meet('c');
}

static void done(const char *what)
{
	meet('d');
	if (first) {
		printf("%s: correct\n", what);
		fflush(stdout);
	}
}

int main(void)
{
	ucp_request_param_t none = { 0 };
	int lines[2], status;
	pid_t other;

	if (socketpair(AF_UNIX, SOCK_STREAM, 0, lines) != 0 || (other = fork()) < 0)
		fail("start", 0);
	first = other != 0;
	line = lines[first];
	close(lines[!first]);
	here = malloc(LONGEST);
	expected = malloc(LONGEST);
	shared = calloc(1, sizeof *shared);
	if (!here || !expected || !shared)
		fail("memory", 0);
	start_worker();
	fcntl(line, F_SETFL, O_NONBLOCK);
	messages(TAG);
	done("tag");
	messages(STREAM);
	done("stream");
	messages(AM);
	done("active messages");
	puts_();
	done("put");
	gets_();
	done("get");
	atomics(sizeof(uint32_t));
	done("atomics of 32 bits");
	atomics(sizeof(uint64_t));
	done("atomics of 64 bits");
	finish("close", ucp_ep_close_nbx(ep, &none));
	meet('e');
	if (!first)
		return 0;
	if (waitpid(other, &status, 0) != other || status != 0)
		fail("the other process", status);
	return 0;
}
