/* Connects to a peer that supports MPA revision 1 only, or that does not complete its reply.
 *
 * elder ADDR PORT
 *
 * The peer is a process with a plain TCP socket. For each behaviour of the peer, this program
 * connects, and checks the event that it receives and the number of TCP connections. The module
 * tries revision 2 twice before it tries revision 1, because the first connection may have failed
 * by accident. Exit status: 0 if all checks pass.
 */
#include "frame.h"
#include "pair.h"

#include <signal.h>
#include <sys/wait.h>

enum way { CLOSES, RESETS, ALWAYS_CLOSES, CLOSES_IN_THE_MIDDLE, WAYS };
static const struct {
	const char *name;
	enum rdma_cm_event_type event;
	int connections;
} ways[WAYS] = {
	[CLOSES] = { "the peer closes on revision 2", RDMA_CM_EVENT_ESTABLISHED, 3 },
	[RESETS] = { "the peer resets on revision 2", RDMA_CM_EVENT_ESTABLISHED, 3 },
	[ALWAYS_CLOSES] = { "the peer always closes", RDMA_CM_EVENT_REJECTED, 3 },
	[CLOSES_IN_THE_MIDDLE] = { "the peer closes in the middle of its reply",
		RDMA_CM_EVENT_REJECTED,
				   1 },
};

static const char greeting[] = "hello", reply[] = "welcome";

static void send_reply(int s, struct frame *frame)
{
	memcpy(frame->key, "MPA ID Rep Frame", sizeof frame->key);
	frame->low = sizeof reply;
	memcpy(frame->data, reply, sizeof reply);
	fail_if(send(s, frame, HEADER_LEN + sizeof reply, 0) != HEADER_LEN + sizeof reply,
		"sending the reply");
}

/* Accepts one connection after the other until it is killed, and writes an octet to `counter` for
 * each. */
static void peer(int listener, enum way way, int counter)
{
	for (;;) {
		struct linger at_once = { .l_onoff = way == RESETS };
		int s = accept(listener, NULL, NULL);
		struct frame frame;

		fail_if(write(counter, "!", 1) != 1 || read_frame(s, &frame), "a request");
		if (way == CLOSES_IN_THE_MIDDLE) {
			fail_if(send(s, "MPA ID", 6, 0) != 6, "sending half a reply");
			/* The data are to arrive before the FIN. */
			usleep(100000);
		} else if (way != ALWAYS_CLOSES && frame.revision == 1) {
			fail_if(priv_data_len(&frame) != sizeof greeting ||
				memcmp(frame.data, greeting, sizeof greeting),
					"the private data of revision 1");
			send_reply(s, &frame);
			continue;
		}
		setsockopt(s, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
		close(s);
	}
}

static pid_t start_peer(const struct sockaddr_in *address, enum way way, int counter)
{
	int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
	pid_t child;

	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
	fail_if(bind(listener, (const struct sockaddr *)address, sizeof *address) ||
		listen(listener, 1), "listening");
	child = fork();
	if (!child)
		peer(listener, way, counter);
	close(listener);
	return child;
}

static void connect_to(struct sockaddr_in *address, enum way way)
{
	struct rdma_conn_param param = { .private_data = greeting,
					 .private_data_len = sizeof greeting };
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_event *result;
	struct rdma_cm_id *id;

	fail_if(!channel || rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "an identifier");
	fail_if(rdma_resolve_addr(id, NULL, (struct sockaddr *)address, 2000), "the address");
	event(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	fail_if(rdma_resolve_route(id, 2000), "the route");
	event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
	fail_if(rdma_create_qp(id, NULL, &attr), "a queue pair");
	fail_if(rdma_connect(id, &param) || rdma_get_cm_event(channel, &result), "connecting");
	printf("%s: %s, status %d\n", ways[way].name, rdma_event_str(result->event),
	       result->status);
	fail_if(result->event != ways[way].event, "unexpected event");
	if (result->event == RDMA_CM_EVENT_ESTABLISHED)
		fail_if(result->param.conn.private_data_len < sizeof reply ||
			memcmp(result->param.conn.private_data, reply, sizeof reply),
			"the peer's private data");
	rdma_ack_cm_event(result);
	rdma_destroy_qp(id);
	drain_events(channel);
	fail_if(rdma_destroy_id(id), "destroying the identifier");
	rdma_destroy_event_channel(channel);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc != 3)
		return 2;
	address.sin_port = htons((unsigned short)atoi(argv[2]));
	fail_if(inet_pton(AF_INET, argv[1], &address.sin_addr) != 1, "the address");
	for (enum way way = 0; way < WAYS; way++) {
		char octets[8];
		int counter[2];
		pid_t child;

		fail_if(pipe(counter), "a pipe");
		child = start_peer(&address, way, counter[1]);
		connect_to(&address, way);
		kill(child, SIGKILL);
		waitpid(child, NULL, 0);
		fail_if(read(counter[0], octets, sizeof octets) != ways[way].connections,
			"wrong number of connections");
		close(counter[0]);
		close(counter[1]);
	}
	return 0;
}
