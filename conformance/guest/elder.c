/* Programs that connect to a peer that supports MPA revision 1 only, or that answers incorrectly.
 *
 * elder ADDR PORT
 *
 * The peer is a process with plain TCP. For each way to answer, a program connects and checks the
 * event that it receives and the number of attempts. Revision 2 is tried twice, because a
 * connection that ends without an answer may be an accident. Exit status: 0 if all checks pass.
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
	[CLOSES] = { "closes on revision 2", RDMA_CM_EVENT_ESTABLISHED, 3 },
	[RESETS] = { "resets on revision 2", RDMA_CM_EVENT_ESTABLISHED, 3 },
	[ALWAYS_CLOSES] = { "always closes", RDMA_CM_EVENT_REJECTED, 3 },
	[CLOSES_IN_THE_MIDDLE] = { "closes in the middle of its answer", RDMA_CM_EVENT_REJECTED,
				   1 },
};

static const char greeting[] = "hello", reply[] = "welcome";

static void answer(int s, struct frame *frame)
{
	memcpy(frame->key, "MPA ID Rep Frame", sizeof frame->key);
	frame->low = sizeof reply;
	memcpy(frame->data, reply, sizeof reply);
	must(send(s, frame, HEAD + sizeof reply, 0) != HEAD + sizeof reply, "the answer");
}

/* Answers one connection after the other until it is killed. */
static void peer(int listener, enum way way, int told)
{
	for (;;) {
		struct linger at_once = { .l_onoff = way == RESETS };
		int s = accept(listener, NULL, NULL);
		struct frame frame;

		must(write(told, "!", 1) != 1 || read_frame(s, &frame), "a request");
		if (way == CLOSES_IN_THE_MIDDLE) {
			must(send(s, "MPA ID", 6, 0) != 6, "half an answer");
			/* Makes the data arrive before the end. */
			usleep(100000);
		} else if (way != ALWAYS_CLOSES && frame.revision == 1) {
			must(data_octets(&frame) != sizeof greeting ||
			     memcmp(frame.data, greeting, sizeof greeting),
				     "the private data of revision 1");
			answer(s, &frame);
			continue;
		}
		setsockopt(s, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
		close(s);
	}
}

static pid_t start_peer(const struct sockaddr_in *address, enum way way, int told)
{
	int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
	pid_t child;

	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
	must(bind(listener, (const struct sockaddr *)address, sizeof *address) ||
	     listen(listener, 1), "listening");
	child = fork();
	if (!child)
		peer(listener, way, told);
	close(listener);
	return child;
}

static void connect_to(struct sockaddr_in *address, enum way way)
{
	struct rdma_conn_param param = { .private_data = greeting,
					 .private_data_len = sizeof greeting };
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_event *event_now;
	struct rdma_cm_id *id;

	must(!channel || rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "an identifier");
	must(rdma_resolve_addr(id, NULL, (struct sockaddr *)address, 2000), "the address");
	event(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	must(rdma_resolve_route(id, 2000), "the route");
	event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
	must(rdma_create_qp(id, NULL, &attr), "a queue pair");
	must(rdma_connect(id, &param) || rdma_get_cm_event(channel, &event_now), "connecting");
	printf("%s: %s, status %d\n", ways[way].name, rdma_event_str(event_now->event),
	       event_now->status);
	must(event_now->event != ways[way].event, "what the program hears");
	if (event_now->event == RDMA_CM_EVENT_ESTABLISHED)
		must(event_now->param.conn.private_data_len < sizeof reply ||
		     memcmp(event_now->param.conn.private_data, reply, sizeof reply),
		     "the peer's private data");
	rdma_ack_cm_event(event_now);
	rdma_destroy_qp(id);
	take_events(channel);
	must(rdma_destroy_id(id), "the end");
	rdma_destroy_event_channel(channel);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc != 3)
		return 2;
	address.sin_port = htons((unsigned short)atoi(argv[2]));
	must(inet_pton(AF_INET, argv[1], &address.sin_addr) != 1, "the address");
	for (enum way way = 0; way < WAYS; way++) {
		char octets[8];
		int told[2];
		pid_t child;

		must(pipe(told), "a pipe");
		child = start_peer(&address, way, told[1]);
		connect_to(&address, way);
		kill(child, SIGKILL);
		waitpid(child, NULL, 0);
		must(read(told[0], octets, sizeof octets) != ways[way].connections,
		     "how often it has connected");
		close(told[0]);
		close(told[1]);
	}
	return 0;
}
