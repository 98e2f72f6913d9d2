package main

import (
	"encoding/json"
	"log/slog"
	"math"
	"net/http"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// problem is an error as clients read it: problem details (RFC 9457), a stable reason, and the fields at fault.
type problem struct {
	Type   string       `json:"type"`
	Title  string       `json:"title"`
	Status int          `json:"status"`
	Detail string       `json:"detail,omitempty"`
	Reason string       `json:"reason"`
	Fields []fieldFault `json:"fields,omitempty"`

	retryAfter time.Duration // 0: nothing is said of it
}

// fieldFault names a field by its JSON path, empty for the whole body.
type fieldFault struct {
	Field       string `json:"field"`
	Description string `json:"description"`
}

func newProblem(httpStatus int, reason, detail string) *problem {
	p := &problem{Type: "about:blank", Title: http.StatusText(httpStatus), Status: httpStatus, Detail: detail, Reason: reason}
	if httpStatus == http.StatusServiceUnavailable || httpStatus == http.StatusTooManyRequests {
		p.retryAfter = time.Second
	}
	return p
}

func badField(reason, field, description string) *problem {
	p := newProblem(http.StatusBadRequest, reason, field+": "+description)
	if field == "" {
		p.Detail = description
	}
	p.Fields = []fieldFault{{field, description}}
	return p
}

// send answers with the problem.
func (p *problem) send(w http.ResponseWriter) {
	header := w.Header()
	header.Set("Content-Type", "application/problem+json")
	header.Set("Cache-Control", "no-store")
	header.Del("Content-Length")
	if p.retryAfter > 0 {
		header.Set("Retry-After", strconv.Itoa(int(math.Ceil(p.retryAfter.Seconds()))))
	}
	if p.Status == http.StatusUnauthorized {
		header.Set("WWW-Authenticate", "Bearer")
	}
	w.WriteHeader(p.Status)
	_, _ = w.Write(p.json())
}

func (p *problem) json() []byte {
	text, err := json.Marshal(p)
	if err != nil {
		panic(err)
	}
	return append(text, '\n')
}

var statuses = map[codes.Code]int{
	codes.InvalidArgument:    http.StatusBadRequest,
	codes.OutOfRange:         http.StatusBadRequest,
	codes.Unauthenticated:    http.StatusUnauthorized,
	codes.PermissionDenied:   http.StatusForbidden,
	codes.NotFound:           http.StatusNotFound,
	codes.AlreadyExists:      http.StatusConflict,
	codes.Aborted:            http.StatusConflict,
	codes.FailedPrecondition: http.StatusConflict,
	codes.ResourceExhausted:  http.StatusTooManyRequests,
	codes.Unavailable:        http.StatusServiceUnavailable,
	codes.DeadlineExceeded:   http.StatusGatewayTimeout,
	codes.Canceled:           http.StatusServiceUnavailable,
}

// Reasons that say more than their code.
var reasonStatuses = map[string]int{
	"REQUEST_ID_REUSED": http.StatusUnprocessableEntity,
	"VERSION_MISMATCH":  http.StatusPreconditionFailed,
	"OVERLOADED":        http.StatusServiceUnavailable,
	"OUTBOX_FULL":       http.StatusServiceUnavailable,
	"WATCHES_FULL":      http.StatusTooManyRequests,
}

// fromStatus turns what a service says into a problem; `named` gives the JSON name of a field's proto path.
func fromStatus(err error, named func(string) string) *problem {
	said := status.Convert(err)
	httpStatus, known := statuses[said.Code()]
	if !known {
		slog.Error("a call failed", "code", said.Code().String(), "message", said.Message())
		return newProblem(http.StatusInternalServerError, "INTERNAL", "Something went wrong here; it is in the logs.")
	}
	p := newProblem(httpStatus, said.Code().String(), said.Message())
	p.Reason = upperSnake(p.Reason)
	for _, detail := range said.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			p.Reason = detail.GetReason()
		case *errdetails.BadRequest:
			for _, violation := range detail.GetFieldViolations() {
				p.Fields = append(p.Fields, fieldFault{named(violation.GetField()), violation.GetDescription()})
			}
		case *errdetails.RetryInfo:
			p.retryAfter = detail.GetRetryDelay().AsDuration()
		}
	}
	if special, known := reasonStatuses[p.Reason]; known {
		p.Status, p.Title = special, http.StatusText(special)
	}
	if len(p.Fields) == 1 {
		p.Detail = p.Fields[0].Description
		if p.Fields[0].Field != "" {
			p.Detail = p.Fields[0].Field + ": " + p.Detail
		}
	}
	switch said.Code() { // What the connection says of itself names addresses.
	case codes.Unavailable, codes.Canceled:
		if len(said.Details()) == 0 {
			p.Detail, p.Reason = "A service behind this one doesn't answer now.", "UNAVAILABLE"
		}
	case codes.DeadlineExceeded:
		p.Detail = "The deadline has passed."
	}
	return p
}

// upperSnake makes "DeadlineExceeded" into "DEADLINE_EXCEEDED".
func upperSnake(camel string) string {
	var out []byte
	for i := range len(camel) {
		c := camel[i]
		if 'A' <= c && c <= 'Z' && i > 0 {
			out = append(out, '_')
		}
		if 'a' <= c && c <= 'z' {
			c -= 'a' - 'A'
		}
		out = append(out, c)
	}
	return string(out)
}
