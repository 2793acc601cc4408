/* Tests UCX's upper layer (UCP): two processes, connected by worker addresses, transfer data with
 * all kinds of operations. A process exits with an error if a value differs from the expected
 * value. The first process prints a line for each kind that is correct. */

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

enum { AM_ID = 7, MAX_LENGTH = 1 << 20, COUNTERS = 2, ROUNDS = 20, LENGTHS = 10 };

static const size_t lengths[LENGTHS] = { 1, 8, 64, 65, 1000, 4096, 8257, 65536, 300001,
	MAX_LENGTH };

/* Memory that the other process may access. */
static struct shared {
	uint64_t wide[COUNTERS];
	uint32_t narrow[COUNTERS];
	unsigned char octets[MAX_LENGTH];
} *shared;

static int first, line;
static ucp_worker_h worker;
static ucp_ep_h ep;
static ucp_rkey_h rkey;
static uint64_t remote;
static unsigned char *buffer, *expected;

/* The last active message that arrived. */
static struct {
	size_t length;
	int arrived;
	/* The request that fetches its data, unless they came with the message. */
	ucs_status_ptr_t fetching;
} am;

static void fail(const char *what, long at)
{
	fprintf(stderr, "%s process: %s (%ld): %s\n", first ? "first" : "second", what, at,
		strerror(errno));
	exit(1);
}

static void check_status(const char *what, ucs_status_t status)
{
	if (status != UCS_OK) {
		fprintf(stderr, "%s process: %s: %s\n", first ? "first" : "second", what,
			ucs_status_string(status));
		exit(1);
	}
}

/* Waits until a request completes. `request` is a status if it completed immediately. */
static void wait_for_request(const char *what, ucs_status_ptr_t request)
{
	ucs_status_t status;

	if (!UCS_PTR_IS_PTR(request)) {
		check_status(what, UCS_PTR_STATUS(request));
		return;
	}
	while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS)
		ucp_worker_progress(worker);
	ucp_request_free(request);
	check_status(what, status);
}

static void flush(void)
{
	ucp_request_param_t none = { 0 };

	wait_for_request("flush", ucp_ep_flush_nbx(ep, &none));
}

/* Sends octets to the other process over the socket pair. */
static void send_control(const void *what, size_t length)
{
	if (write(line, what, length) != (ssize_t)length)
		fail("write", (long)length);
}

/* Receives octets from the socket pair. Meanwhile, UCX makes progress.
 */
static void receive_control(void *what, size_t length)
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

/* A barrier for both processes. */
static void barrier(char step)
{
	char theirs = 0;

	send_control(&step, 1);
	receive_control(&theirs, 1);
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
	am.arrived = 1;
	if (!(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
		memcpy(buffer, data, length);
		return UCS_OK;
	}
	am.fetching = ucp_am_recv_data_nbx(worker, data, buffer, length, &none);
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

	check_status("init", ucp_init(&params, NULL, &context));
	check_status("worker", ucp_worker_create(context, &worker_params, &worker));
	check_status("handler", ucp_worker_set_am_recv_handler(worker, &handler));
	map.address = shared;
	check_status("map", ucp_mem_map(context, &map, &memory));

	check_status("address", ucp_worker_get_address(worker, &address, &length));
	send_control(&length, sizeof length);
	send_control(address, length);
	receive_control(&length, sizeof length);
	theirs = malloc(length);
	receive_control(theirs, length);
	ep_params.address = theirs;
	check_status("end point", ucp_ep_create(worker, &ep_params, &ep));

	own = (uintptr_t)shared;
	check_status("key", ucp_rkey_pack(context, memory, &key, &length));
	send_control(&own, sizeof own);
	send_control(&length, sizeof length);
	send_control(key, length);
	receive_control(&remote, sizeof remote);
	receive_control(&length, sizeof length);
	theirs = malloc(length);
	receive_control(theirs, length);
	check_status("their key", ucp_ep_rkey_unpack(ep, theirs, &rkey));
}

enum kind { TAG, STREAM, AM };

static void send_by(enum kind kind, const unsigned char *from, size_t length)
{
	ucp_request_param_t none = { 0 };

	switch (kind) {
	case TAG:
		wait_for_request("send", ucp_tag_send_nbx(ep, from, length, 42 + length, &none));
		break;
	case STREAM:
		wait_for_request("send", ucp_stream_send_nbx(ep, from, length, &none));
		break;
	case AM:
		wait_for_request("send", ucp_am_send_nbx(ep, AM_ID, &length, sizeof length, from,
			length,
					       &none));
		break;
	}
}

static void receive_by(enum kind kind, size_t length)
{
	ucp_request_param_t none = { 0 };
	ucp_request_param_t all = { .op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
				    .flags = UCP_STREAM_RECV_FLAG_WAITALL };
	size_t had = length;

	switch (kind) {
	case TAG:
		wait_for_request("receive", ucp_tag_recv_nbx(worker, buffer, length, 42 + length,
			(ucp_tag_t)-1,
						   &none));
		break;
	case STREAM:
		wait_for_request("receive", ucp_stream_recv_nbx(ep, buffer, length, &had, &all));
		break;
	case AM:
		while (!am.arrived)
			ucp_worker_progress(worker);
		wait_for_request("fetch", am.fetching);
		had = am.length;
		am.arrived = 0;
		am.fetching = NULL;
		break;
	}
	if (had != length)
		fail("length", (long)had);
}

/* Sends messages in both directions, alternating. Messages of the first process have even seeds. */
static void messages(enum kind kind)
{
	unsigned char *text = malloc(MAX_LENGTH);

	for (unsigned round = 0; round < ROUNDS * LENGTHS; round++) {
		size_t length = lengths[round % LENGTHS];

		for (int turn = 0; turn < 2; turn++) {
			unsigned seed = round * 2 + (unsigned)turn;

			if (turn == !first) {
				fill(text, length, seed);
				send_by(kind, text, length);
			} else {
				receive_by(kind, length);
				check("message", buffer, length, seed);
			}
		}
	}
	free(text);
}

/* Each process writes to the memory of the other process, which checks it. */
static void test_put(void)
{
	ucp_request_param_t none = { 0 };
	uint64_t at = remote + offsetof(struct shared, octets);

	for (unsigned round = 0; round < LENGTHS; round++) {
		size_t length = lengths[round];

		fill(buffer, length, round * 2 + !first);
		wait_for_request("put", ucp_put_nbx(ep, buffer, length, at, rkey, &none));
		flush();
		barrier('p');
		check("put", shared->octets, length, round * 2 + first);
		barrier('q');
	}
}

/* Each process reads the memory of the other process, and checks it. */
static void test_get(void)
{
	ucp_request_param_t none = { 0 };
	uint64_t at = remote + offsetof(struct shared, octets);

	for (unsigned round = 0; round < LENGTHS; round++) {
		size_t length = lengths[round];

		fill(shared->octets, length, round * 2 + !first);
		barrier('g');
		memset(buffer, 0, length);
		wait_for_request("get", ucp_get_nbx(ep, buffer, length, at, rkey, &none));
		check("get", buffer, length, round * 2 + first);
		barrier('h');
	}
}

/* Performs an operation on a counter of the other process. With `reply`, returns the counter's
 * previous value. For compare and swap, `*reply` is the new value. */
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
	wait_for_request("atomic", ucp_atomic_op_nbx(ep, op, &value, 1,
		remote + offset + counter * size,
					   rkey, &param));
	if (!reply)
		flush();
	return size == sizeof value.wide ? answer.wide : answer.narrow;
}

static void expect_equal(const char *what, uint64_t have, uint64_t want)
{
	if (have != want)
		fail(what, (long)have);
}

/* Each process performs every atomic operation on the counters of the other process. */
static void atomics(size_t size)
{
	uint64_t mask = size == sizeof(uint64_t) ? UINT64_MAX : UINT32_MAX,
		start = 0x1234567890abcdef & mask, swap;

	shared->wide[0] = shared->wide[1] = start;
	shared->narrow[0] = shared->narrow[1] = (uint32_t)start;
	barrier('a');
	expect_equal("fetch and add", atomic(UCP_ATOMIC_OP_ADD, 5, size, 0, &(uint64_t){ 0 }),
		start);
	expect_equal("swap", atomic(UCP_ATOMIC_OP_SWAP, 0xff00ff, size, 0, &(uint64_t){ 0 }),
	   (start + 5) & mask);
	swap = 77;
	expect_equal("compare and swap, other", atomic(UCP_ATOMIC_OP_CSWAP, 1, size, 0, &swap),
		0xff00ff);
	expect_equal("compare and swap, same", atomic(UCP_ATOMIC_OP_CSWAP, 0xff00ff, size, 0,
		&swap),
	   0xff00ff);
	atomic(UCP_ATOMIC_OP_ADD, 3, size, 0, NULL);
	expect_equal("fetch and or", atomic(UCP_ATOMIC_OP_OR, 0xf00, size, 0, &(uint64_t){ 0 }),
		80);
	expect_equal("fetch and and", atomic(UCP_ATOMIC_OP_AND, 0xff0, size, 0, &(uint64_t){ 0 }),
		80 |
	   0xf00);
	expect_equal("fetch and xor", atomic(UCP_ATOMIC_OP_XOR, 0xff, size, 0, &(uint64_t){ 0 }),
		0xf50);
	for (int i = 0; i < ROUNDS; i++)
		atomic(UCP_ATOMIC_OP_ADD, 2, size, 1, i % 2 ? NULL : &(uint64_t){ 0 });
	barrier('b');
	expect_equal("counter", size == sizeof(uint64_t) ? shared->wide[0] : shared->narrow[0],
		0xf50 ^ 0xff);
	expect_equal("sum", size == sizeof(uint64_t) ? shared->wide[1] : shared->narrow[1],
	   (start + 2 * ROUNDS) & mask);
	barrier('c');
}

static void done(const char *what)
{
	barrier('d');
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
	buffer = malloc(MAX_LENGTH);
	expected = malloc(MAX_LENGTH);
	shared = calloc(1, sizeof *shared);
	if (!buffer || !expected || !shared)
		fail("memory", 0);
	start_worker();
	fcntl(line, F_SETFL, O_NONBLOCK);
	messages(TAG);
	done("tag");
	messages(STREAM);
	done("stream");
	messages(AM);
	done("active messages");
	test_put();
	done("put");
	test_get();
	done("get");
	atomics(sizeof(uint32_t));
	done("atomics of 32 bits");
	atomics(sizeof(uint64_t));
	done("atomics of 64 bits");
	wait_for_request("close", ucp_ep_close_nbx(ep, &none));
	barrier('e');
	if (!first)
		return 0;
	if (waitpid(other, &status, 0) != other || status != 0)
		fail("the second process failed", status);
	return 0;
}
